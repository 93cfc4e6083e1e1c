"""Adapters as PEFT writes them give the logits that PEFT computes, on transformers' own Llama."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from adapters import set_keys
from checkpoint_quantized import RECIPES, write_quantized
from checkpoints import write_checkpoint, write_weights
from minicpm_cli.errors import UnsupportedModel, WeightsError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.loader import load_model
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.lora_source import rescale
from minicpm_cli.model.source import open_source
from quant.rtn import rtn
from steps import all_logits, relative_error

peft = pytest.importorskip("peft")
IDS = [1, 20, 33, 300, 7, 7, 250, 12, 99]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 16},
    "one of the joined": {"target_modules": ["k_proj", "up_proj"], "r": 3, "lora_alpha": 7},
    "all-linear": {"target_modules": "all-linear", "r": 4, "lora_alpha": 8},
    "regex": {"target_modules": r".*\.(1)\.(self_attn\.[qk]_proj|mlp\.down_proj)", "r": 4},
    "rslora": {"target_modules": ALL, "r": 16, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 12, "^model.layers.0.self_attn.o_proj": 5},
        "alpha_pattern": {"v_proj": 32, "down_proj": 3},
    },
    "dora": {"target_modules": ALL, "r": 4, "lora_alpha": 8, "use_dora": True},
    "dora and rslora of the head": {"target_modules": ["lm_head", "v_proj"], "use_dora": True, "use_rslora": True},
    "layers": {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer": {"target_modules": ["o_proj"], "layers_to_transform": 0},
    "excluded": {"target_modules": ALL, "exclude_modules": ["v_proj"]},
    "fan_in_fan_out": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "saved ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved norms and a matrix": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["input_layernorm", "norm", "0.mlp.up_proj"],
    },
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in float32."""
    path = tmp_path_factory.mktemp("base")
    return write_checkpoint(path, "minicpm5-1b", fmt="safetensors", dtype=torch.float32, tie=request.param)


def reference(base: Path, target: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Tensor:
    """Writes an adapter of random weights and returns the logits with it; nothing is merged there."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of tied matrices and of what it calls in transformers
        adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **keys)).eval()
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "modules_to_save" in name or "magnitude" in name:
                    weight.add_(torch.randn_like(weight) * 0.1)
        adapted.save_pretrained(target)
    with torch.inference_mode():
        return adapted(torch.tensor([IDS])).logits[0]


def config(base: Path) -> ModelConfig:
    folder = base if base.is_dir() else base.parent
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text())).with_context(64)


def ours(base: Path, target: Path | None, dtype: torch.dtype = torch.float32) -> Tensor:
    adapter = Adapter.read(target, config(base)) if target else None
    decoder = load_model(base, config(base), torch.device("cpu"), dtype, adapter=adapter)
    return all_logits(decoder, IDS)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(folder: Path, tmp_path: Path, name: str) -> None:
    expected = reference(folder, tmp_path, **CASES[name])
    assert relative_error(ours(folder, tmp_path), expected) < 1e-5
    assert relative_error(ours(folder, None), expected) > 1e-2, "the adapter does something"


def test_bfloat16_is_merged_in_float32_and_rounded_once(folder: Path, tmp_path: Path) -> None:
    expected = reference(folder, tmp_path, **CASES["rslora"])
    assert relative_error(ours(folder, tmp_path, torch.bfloat16), expected) < 2e-2
    cfg, adapter = config(folder), Adapter.read(tmp_path, config(folder))
    exact = load_model(folder, cfg, torch.device("cpu"), torch.float32, adapter=adapter).blocks[1].mlp.down
    rounded = load_model(folder, cfg, torch.device("cpu"), torch.bfloat16, adapter=adapter).blocks[1].mlp.down
    assert torch.equal(rounded.dequantize(), exact.dequantize().bfloat16())


def plain_twin(folder: Path, meant: dict[str, Tensor]) -> Path:
    """What a quantized folder stands for, for transformers."""
    folder.mkdir()
    write_checkpoint(folder, "minicpm5-1b", fmt="safetensors", dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    write_weights(folder, meant, "safetensors")
    return folder


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "nf4", "int8", "fp8", "packed-4"])
def test_beside_packed_weights(tmp_path: Path, name: str) -> None:
    meant = write_quantized(tmp_path / "packed", "minicpm5-1b", RECIPES[name])
    twin, adapter = plain_twin(tmp_path / "plain", meant), tmp_path / "adapter"
    for case in ("patterns", "one of the joined", "saved ends"):
        expected = reference(twin, adapter, **CASES[case])
        assert relative_error(ours(tmp_path / "packed", adapter), expected) < 1e-5
        assert relative_error(ours(tmp_path / "packed", adapter, torch.bfloat16), expected) < 3e-2
        assert relative_error(ours(tmp_path / "packed", None), expected) > 5e-2


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_onto_gguf(tmp_path: Path, quant: str) -> None:
    """llama.cpp's files have other names, and the rows of q and k in another order."""
    file = write_checkpoint(tmp_path / "gguf", "minicpm5-1b", fmt="gguf", quant=quant)
    source, cfg = open_source(file, config(file)), config(file)
    meant = {}
    for name in sorted(source.names()):
        stored = source.take(name, source.shape(name))
        meant[name] = (stored if isinstance(stored, Tensor) else stored.dequantize()).float().clone()
    source.finish()
    twin, adapter = plain_twin(tmp_path / "plain", meant), tmp_path / "adapter"
    for case in ("patterns", "head", "saved embedding"):
        expected = reference(twin, adapter, **CASES[case])
        assert relative_error(ours(file, adapter), expected) < 1e-5
        assert relative_error(ours(file, adapter, torch.bfloat16), expected) < 3e-2
    assert cfg.tie is False


@pytest.mark.parametrize("quantize", ["w4", "w8", "nf4"])
def test_merged_before_it_is_quantized_at_load(folder: Path, tmp_path: Path, quantize: str) -> None:
    reference(folder, tmp_path, **CASES["rslora"])
    adapter, cfg, scheme = Adapter.read(tmp_path, config(folder)), config(folder), LoadScheme.of(quantize, 16)
    exact = load_model(folder, cfg, torch.device("cpu"), torch.float32, adapter=adapter)
    coarse = load_model(folder, cfg, torch.device("cpu"), torch.float32, adapter=adapter, scheme=scheme)
    wanted = scheme.matrix("model.layers.0.mlp.down_proj.weight", cfg.intermediate)
    assert wanted is not None
    merged = exact.blocks[0].mlp.down.dequantize()
    assert torch.equal(coarse.blocks[0].mlp.down.dequantize(), rtn(merged, wanted).dequantize())


def test_dora_onto_packed_weights_is_refused_before_they_are_loaded(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path / "packed", "minicpm5-1b", RECIPES["gptq"])
    reference(plain_twin(tmp_path / "plain", meant), tmp_path / "adapter", **CASES["dora"])
    checkpoint = Checkpoint.read(tmp_path / "packed").with_adapter(tmp_path / "adapter")
    with pytest.raises(UnsupportedModel, match="DoRA rescales the rows"):
        checkpoint.weight_bytes(2)
    with pytest.raises(UnsupportedModel, match="DoRA rescales the rows"):
        ours(tmp_path / "packed", tmp_path / "adapter")


def test_dora_is_merged_before_it_is_quantized_at_load(folder: Path, tmp_path: Path) -> None:
    expected = reference(folder, tmp_path, **CASES["dora"])
    adapter, cfg = Adapter.read(tmp_path, config(folder)), config(folder)
    coarse = load_model(
        folder, cfg, torch.device("cpu"), torch.float32, adapter=adapter, scheme=LoadScheme.of("w8", 16)
    )
    assert relative_error(all_logits(coarse, IDS), expected) < 3e-2  # 8 bits
    assert adapter.label.startswith("dora r4 ")


def test_dora_without_its_magnitudes_or_of_an_embedding(folder: Path, tmp_path: Path) -> None:
    reference(folder, tmp_path / "plain", **CASES["list"])
    set_keys(tmp_path / "plain", use_dora=True)
    with pytest.raises(WeightsError, match="has no factor magnitude"):
        Adapter.read(tmp_path / "plain", config(folder))
    reference(folder, tmp_path / "embedding", use_dora=True, **CASES["embedding"])
    with pytest.raises(UnsupportedModel, match="DoRA of an embedding"):
        Adapter.read(tmp_path / "embedding", config(folder))


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    rescale(weight, torch.tensor([2.0, 10.0]))
    assert weight.tolist() == [[0.0, 0.0], [6.0, 8.0]]
