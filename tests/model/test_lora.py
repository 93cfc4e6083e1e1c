"""Adapters on every kind of model, against a merge by hand in float64; and what is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import MLA, set_keys, set_tensors, write_adapter
from checkpoint_quantized import RECIPES, write_quantized
from checkpoints import checkpoint_config, state_dict, tensor_shapes, write_checkpoint
from minicpm_cli.errors import ConfigError, MinicpmError, UnsupportedModel, WeightsError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.lora_config import LoraConfig
from minicpm_cli.model.lora_layer import LowRankBeside
from minicpm_cli.settings import LoadOptions
from steps import all_logits, decoder_of, relative_error

IDS = [1, 20, 33, 300, 7, 7, 250, 12, 99]
CPU, FP32 = torch.device("cpu"), torch.float32
EXPERTS = ("w1", "w2", "w3", "gate")
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "minicpm3-4b": MLA,
    "minicpm-2b": DENSE,
    "minicpm4-0.5b": ("q_proj", "down_proj"),
    "minicpm-moe-8x2b": ("v_proj", *EXPERTS),
}


def opened(path: Path, adapter: Path | None = None, **options: Any) -> Checkpoint:
    load = LoadOptions(lora=str(adapter) if adapter else None, **options)
    found = Checkpoint.read(path).with_options(load)
    object.__setattr__(found, "cfg", found.cfg.with_context(64))
    return found


def decoded(path: Path, adapter: Path | None = None, dtype: torch.dtype = FP32, **options: Any) -> Decoder:
    return opened(path, adapter, **options).decoder(CPU, dtype)


def by_hand(path: Path, state: dict[str, Tensor], deltas: dict[str, Tensor]) -> Tensor:
    """Logits of the model merged in float64."""
    merged = {n: (t.double() + deltas[n]).float() if n in deltas else t.float() for n, t in state.items()}
    cfg = opened(path).cfg
    if cfg.tie:
        merged.pop("lm_head.weight", None)
    return all_logits(decoder_of(cfg, merged), IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_merge_by_hand(tmp_path: Path, family: str) -> None:
    path, adapter = write_checkpoint(tmp_path / "base", family, dtype=FP32), tmp_path / "adapter"
    deltas = write_adapter(adapter, tensor_shapes(checkpoint_config(family)), FAMILIES[family])
    expected = by_hand(path, state_dict(family, dtype=FP32), deltas)
    assert relative_error(all_logits(decoded(path, adapter), IDS), expected) < 1e-5
    assert relative_error(all_logits(decoded(path, adapter, torch.bfloat16), IDS), expected) < 3e-2
    assert relative_error(all_logits(decoded(path), IDS), expected) > 5e-2, "the adapter does something"


@pytest.mark.parametrize("recipe", ["gptq", "gptq-order", "nf4", "fp8"])
@pytest.mark.parametrize("family", ["minicpm3-4b", "minicpm-2b", "minicpm-moe-8x2b"])
def test_beside_packed_weights_equals_a_merge_by_hand(tmp_path: Path, family: str, recipe: str) -> None:
    path, adapter = tmp_path / "base", tmp_path / "adapter"
    meant = write_quantized(path, family, RECIPES[recipe])
    deltas = write_adapter(adapter, tensor_shapes(checkpoint_config(family)), FAMILIES[family], alpha=12)
    expected = by_hand(path, meant, deltas)
    assert relative_error(all_logits(decoded(path, adapter), IDS), expected) < 1e-5
    if "moe" not in family:  # where a router may choose another expert, for a rounding's sake
        assert relative_error(all_logits(decoded(path, adapter, torch.bfloat16), IDS), expected) < 3e-2


@pytest.mark.parametrize("quant", ["F16", "Q4_0", "Q8_0"])
def test_onto_a_gguf_of_mla(tmp_path: Path, quant: str) -> None:
    path, adapter = write_checkpoint(tmp_path, "minicpm3-4b", fmt="gguf", quant=quant), tmp_path / "adapter"
    deltas = write_adapter(adapter, tensor_shapes(checkpoint_config("minicpm3-4b")), MLA)
    plain = decoded(path)
    state = {n: t.float() for n, t in state_dict("minicpm3-4b").items()}
    block, found = plain.blocks[0].attention, decoded(path, adapter).blocks[0].attention
    assert relative_error(all_logits(decoded(path, adapter), IDS), all_logits(plain, IDS)) > 5e-2
    name = "model.layers.0.self_attn.o_proj.weight"
    assert relative_error(found.out.dequantize(), block.out.dequantize().double() + deltas[name]) < 1e-6
    if quant == "F16":
        assert relative_error(all_logits(decoded(path, adapter), IDS), by_hand(path, state, deltas)) < 5e-3


@pytest.mark.parametrize("family", ["minicpm3-4b", "minicpm5-1b"])
@pytest.mark.parametrize("recipe", ["gptq", "nf4", "gptq-head"])
@pytest.mark.parametrize("targets", [(*DENSE, *MLA), ("o_proj", "embed_tokens"), ("o_proj", "lm_head")])
def test_the_plan_counts_it(tmp_path: Path, family: str, recipe: str, targets: tuple[str, ...]) -> None:
    path, adapter = tmp_path / "base", tmp_path / "adapter"
    write_quantized(path, family, RECIPES[recipe])
    shapes = tensor_shapes(checkpoint_config(family))
    write_adapter(adapter, shapes | {"model.lm_head.weight": (1, 1)}, targets)
    if "lm_head" in targets:
        _move_head(adapter, shapes["lm_head.weight"])
    without, found = opened(path), opened(path, adapter)
    grown = decoded(path, adapter).weight_bytes - decoded(path).weight_bytes
    assert found.weight_bytes(4, cpu=True) - without.weight_bytes(4, cpu=True) == grown
    assert grown > 0


def _move_head(adapter: Path, shape: tuple[int, ...]) -> None:
    set_tensors(
        adapter,
        model__lm_head__lora_A__weight=None,
        model__lm_head__lora_B__weight=None,
        lm_head__lora_A__weight=torch.randn(8, shape[1]) * 0.1,
        lm_head__lora_B__weight=torch.randn(shape[0], 8) * 0.1,
    )


@pytest.mark.parametrize("quant", ["F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_plan_counts_it_in_gguf(tmp_path: Path, quant: str, tie: bool) -> None:
    path = write_checkpoint(tmp_path, "minicpm5-1b", fmt="gguf", quant=quant, tie=tie)
    shapes = tensor_shapes(checkpoint_config("minicpm5-1b", tie=tie))
    for targets in (DENSE, ("o_proj", "embed_tokens")):
        adapter = tmp_path / "-".join(targets)
        write_adapter(adapter, shapes, targets)
        grown = decoded(path, adapter).weight_bytes - decoded(path).weight_bytes
        found = opened(path, adapter).weight_bytes(4, cpu=True) - opened(path).weight_bytes(4, cpu=True)
        if "embed_tokens" not in targets or quant == "F16":
            assert found == grown
        else:  # a packed embedding, which float32 leaves packed, is planned as a plain one
            assert decoded(path, adapter).weight_bytes <= opened(path, adapter).weight_bytes(4, cpu=True)
            assert (found > grown // 2) == tie


def test_what_stays_beside_is_told(tmp_path: Path) -> None:
    path, adapter = tmp_path / "base", tmp_path / "adapter"
    write_quantized(path, "minicpm5-1b", RECIPES["gptq"])
    write_adapter(adapter, tensor_shapes(checkpoint_config("minicpm5-1b")), ("k_proj", "down_proj"))
    found = opened(path, adapter)
    assert found.scheme("bf16") == f"gptq w4 g32 sym, lora r8 {found.adapter.digest[:8]}"  # type: ignore[union-attr]
    block = decoded(path, adapter).blocks[0]
    assert isinstance(block.attention.qkv, LowRankBeside)
    assert not isinstance(block.attention.out, LowRankBeside)
    assert not hasattr(block.mlp.down, "fused_rows"), "a product that could not take it is not used"


# ---- refusals


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "minicpm5-1b", fmt="safetensors")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "a", tensor_shapes(checkpoint_config("minicpm5-1b")), ("q_proj", "v_proj"))
    return tmp_path / "a"


def refused(base: Path, adapter: Path, kind: type[MinicpmError]) -> str:
    with pytest.raises(kind) as error:
        opened(base, adapter)
    assert str(adapter) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"use_qalora": True}, "QA-LoRA"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": None}, "without peft_type"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "changed the base model"),
        ({"a_key_of_tomorrow": {"x": 1}}, "a_key_of_tomorrow"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    base: Path, adapter: Path, keys: dict[str, Any], said: str
) -> None:
    set_keys(adapter, **keys)
    assert said in refused(base, adapter, UnsupportedModel)


@pytest.mark.parametrize(
    "keys",
    [
        {"use_dora": False, "a_key_of_tomorrow": None, "another": {}, "lora_dropout": 0.1, "inference_mode": True},
        {"init_lora_weights": "gaussian", "fan_in_fan_out": True, "revision": "main", "task_type": "CAUSAL_LM"},
        {"auto_mapping": {"base_model_class": "X"}, "unsloth_fixed": True, "peft_version": "0.99"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "megatron_core": "megatron.core"},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": ["k_proj"]},
        {"target_modules": ["k_proj", "q_proj", "v_proj"], "exclude_modules": "model.layers.*.k_proj|.*k_proj"},
    ],
)
def test_what_only_training_reads_is_passed_over(base: Path, adapter: Path, keys: dict[str, Any]) -> None:
    set_keys(adapter, **keys)
    assert opened(base, adapter).adapter is not None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"r": 0}, "r is 0; it must be a whole number above 0"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; it must be a number"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; it must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern is [1]; it must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
        ({"alpha_pattern": {"(": 1}}, "a regular expression"),
        ({"target_modules": "("}, "a regular expression"),
        ({"target_modules": [1]}, "a list of strings"),
        ({"layers_to_transform": "all"}, "a layer's number"),
    ],
)
def test_keys_that_make_no_sense(base: Path, adapter: Path, keys: dict[str, Any], said: str) -> None:
    set_keys(adapter, **keys)
    assert said in refused(base, adapter, ConfigError)


def test_files_that_are_not_there(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "holds no adapter_config.json" in refused(base, base, ConfigError)
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    assert "holds no adapter_model.safetensors" in refused(base, adapter, WeightsError)
    (adapter / "adapter_model.safetensors").write_bytes((tmp_path / "elsewhere").read_bytes()[:-100])
    assert "damaged or incomplete" in refused(base, adapter, WeightsError)
    (adapter / "adapter_config.json").write_text("{")
    assert "JSON" in refused(base, adapter, ConfigError)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model__layers__0__self_attn__q_proj__lora_A__weight": None}, "has no factor A"),
        ({"model__layers__0__self_attn__q_proj__lora_A__weight": torch.zeros(8, 5)}, "has shape [8, 5], expected [8, "),
        ({"model__layers__0__self_attn__q_proj__lora_A__weight": torch.zeros(4, 64)}, "expected [8, "),
        ({"model__layers__0__self_attn__o_proj__lora_A__weight": torch.zeros(8, 5)}, "the adapter's target_modules"),
        ({"model__layers__9__self_attn__q_proj__lora_A__weight": torch.zeros(8, 5)}, "has no place for"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.zeros(8)}, "has no place for"),
        ({"model__layers__0__self_attn__q_proj__lora_magnitude_vector": torch.zeros(8)}, "has a magnitude, but"),
        ({"lm_head__weight": torch.zeros(8, 8)}, "has shape [8, 8]"),
        ({"model__layers__0__self_attn__q_proj__lora_A__weight": torch.zeros(8, 5, dtype=torch.int8)}, "is I8"),
        (
            {f"model__layers__0__self_attn__q_proj__lora_{f}__weight": None for f in "AB"},
            "model.layers.0.self_attn.q_proj.weight are missing in spite of the adapter's target_modules",
        ),
    ],
)
def test_an_adapter_of_another_model(base: Path, adapter: Path, tensors: dict[str, Any], said: str) -> None:
    set_tensors(adapter, **tensors)
    assert said in refused(base, adapter, WeightsError)


def test_an_adapter_of_another_family(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", tensor_shapes(checkpoint_config("minicpm3-4b")), MLA)
    said = refused(base, tmp_path / "a", WeightsError)
    assert "this model has no place for base_model.model.model.layers.0.self_attn.kv_a_proj_with_mqa.lora_A" in said
    assert "Give the model that it was trained on with -m" in said


def test_modules_to_save_that_are_not_there(base: Path, adapter: Path) -> None:
    set_keys(adapter, modules_to_save=["lm_head"])
    assert "lm_head.weight are missing in spite of the adapter's modules_to_save" in refused(
        base, adapter, WeightsError
    )


def test_pickled_adapters_hold_tensors_or_are_refused(base: Path, adapter: Path) -> None:
    from safetensors.torch import load_file

    expected = all_logits(decoded(base, adapter), IDS)
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    assert torch.equal(all_logits(decoded(base, adapter), IDS), expected)
    torch.save(tensors | {"evil": print}, adapter / "adapter_model.bin")
    assert "tries to run code" in refused(base, adapter, WeightsError)


def test_a_load_that_fails_leaves_the_adapter_closed(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minicpm_cli.model import lora_source

    closed: list[Path] = []
    monkeypatch.setattr(lora_source.AdapterTensors, "close", lambda self: closed.append(self._file))
    monkeypatch.setattr(lora_source, "merged", lambda weight, factors: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoded(base, adapter)
    assert closed == [adapter / "adapter_model.safetensors"]


# ---- what it is called


def test_the_digest_is_of_both_files(base: Path, adapter: Path) -> None:
    first = opened(base, adapter).adapter
    set_keys(adapter, lora_alpha=17)
    second = opened(base, adapter).adapter
    write_adapter(adapter, tensor_shapes(checkpoint_config("minicpm5-1b")), ("q_proj", "v_proj"), alpha=17, seed=1)
    third = opened(base, adapter).adapter
    assert first is not None
    assert second is not None
    assert third is not None
    assert len({first.digest, second.digest, third.digest}) == 3


@pytest.mark.parametrize(
    ("trained_on", "name", "told"),
    [
        ("openbmb/MiniCPM3-4B", "openbmb/MiniCPM3-4B", False),
        ("openbmb/MiniCPM3-4B", "/models/minicpm3-4b", False),
        ("/home/x/MiniCPM3-4B/", "minicpm3-4b@main", False),
        ("openbmb/MiniCPM3-4B", "openbmb/MiniCPM3-4B-GPTQ-Int4", False),
        ("openbmb/MiniCPM3-4B-GPTQ-Int4", "openbmb/MiniCPM3-4B", False),
        ("openbmb/MiniCPM4-8B", "openbmb/MiniCPM3-4B", True),
        ("openbmb/MiniCPM4.1-8B", "openbmb/MiniCPM4-8B", True),
        (None, "x", False),
        ("", "x", False),
    ],
)
def test_another_base_is_told(base: Path, adapter: Path, trained_on: str | None, name: str, told: bool) -> None:
    set_keys(adapter, base_model_name_or_path=trained_on)
    note = Adapter.read(adapter, opened(base).cfg).note(name)
    assert (note is not None and str(trained_on) in note) == told


def test_scale_and_rank_follow_the_patterns(adapter: Path) -> None:
    set_keys(adapter, rank_pattern={"q_proj": 4, "layers.1.self_attn.v_proj": 2}, alpha_pattern={"^model.x": 1})
    config = LoraConfig.read(adapter)
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 4
    assert config.rank_of("model.layers.1.self_attn.v_proj") == 2
    assert config.rank_of("model.layers.11.self_attn.v_proj") == 8
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 16 / 4
    assert config.scale_of("model.x") == 1 / 8
    assert config.scale_of("model.layers.2.model.x") == 16 / 8
    set_keys(adapter, use_rslora=True)
    assert LoraConfig.read(adapter).scale_of("model.layers.0.self_attn.q_proj") == 16 / 2
