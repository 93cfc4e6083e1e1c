"""Quantized checkpoints that are not read, contradict themselves, or are damaged: refused, with everything named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_quantized import RECIPES, set_config, write_quantized
from checkpoints import checkpoint_config, write_checkpoint
from minicpm_cli.errors import ConfigError, MinicpmError, UnsupportedModel, UsageError, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.quant_config import QuantConfig
from minicpm_cli.model.quantized_source import QuantizedSource
from minicpm_cli.model.source import open_source

FAMILY = "minicpm5-1b"
Q_PROJ = "model.layers.0.self_attn.q_proj"
GPTQ = RECIPES["gptq"].config
PACKED = RECIPES["packed-4"].config


@pytest.fixture
def cfg() -> ModelConfig:
    return ModelConfig.from_hf(checkpoint_config(FAMILY))


def take_all(folder: Path, cfg: ModelConfig, gptq_format: str | None = None) -> None:
    """Takes every tensor at the shape that the plain model has, as a decoder does."""
    plain = write_checkpoint(folder.parent / "plain", FAMILY, fmt="safetensors")
    source = open_source(folder, cfg, gptq_format)
    for name, tensor in load_file(plain / "model.safetensors").items():
        source.take(name, tuple(tensor.shape))
    source.finish()


def take_q(folder: Path, cfg: ModelConfig, gptq_format: str | None = None) -> torch.Tensor:
    return open_source(folder, cfg, gptq_format).take(f"{Q_PROJ}.weight", (256, 192)).dequantize()


def folder_of(path: Path, recipe: str = "gptq", **options: Any) -> Path:
    folder = path / recipe
    write_quantized(folder, FAMILY, RECIPES[recipe], **options)
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of q_proj in the file; None removes one."""
    file = folder / "model.safetensors"
    state = load_file(file) | {f"{Q_PROJ}.{ending}": t for ending, t in tensors.items()}
    save_file({n: t for n, t in state.items() if t is not None}, file)


def stored(folder: Path, ending: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[f"{Q_PROJ}.{ending}"]


# ---- config and files disagree


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_config_says_quantized_but_the_files_are_not(tmp_path: Path, cfg: ModelConfig, fmt: str) -> None:
    folder = write_checkpoint(tmp_path, FAMILY, fmt=fmt)
    set_config(folder, quantization_config=GPTQ)
    with pytest.raises(WeightsError, match=r"config.json says .*\(gptq w4 g32 sym\), but the files hold plain tensors"):
        open_source(folder, cfg)


@pytest.mark.parametrize(("recipe", "kind"), [("gptq", "gptq or awq"), ("packed-4", "compressed-tensors")])
def test_the_files_are_quantized_but_nothing_says_so(tmp_path: Path, cfg: ModelConfig, recipe: str, kind: str) -> None:
    folder = folder_of(tmp_path, recipe)
    set_config(folder, quantization_config=None)
    with pytest.raises(WeightsError, match=rf"holds quantized tensors \({kind}.*no quantization_config"):
        open_source(folder, cfg)


def test_another_method_than_the_files(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    set_config(folder, quantization_config=PACKED)
    with pytest.raises(WeightsError, match="quantized with compressed-tensors, but the files hold tensors of gptq"):
        open_source(folder, cfg)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 8}, r"q_proj.qweight has shape \[24, \d+\], expected \[48, .*by its shape it has 4 bits, .* says 8"),
        ({"group_size": 64}, r"q_proj.qzeros has shape \[6, .*expected \[3, .*by its shape the group is 32"),
    ],
)
def test_another_size_than_the_files(tmp_path: Path, cfg: ModelConfig, changed: dict[str, Any], message: str) -> None:
    folder = folder_of(tmp_path)
    set_config(folder, quantization_config=GPTQ | changed)
    with pytest.raises(WeightsError, match=message) as caught:
        take_q(folder, cfg)
    assert "model.safetensors" in str(caught.value)


def test_padded_inputs(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    set_config(folder, quantization_config=GPTQ | {"group_size": 1024})
    change(folder, qweight=torch.zeros(1024 // 8, stored(folder, "qweight").shape[1], dtype=torch.int32))
    with pytest.raises(WeightsError, match="padded from 192 to 1024"):
        take_q(folder, cfg)


# ---- tensors that are missing, wrong or left over


@pytest.mark.parametrize(
    ("recipe", "ending"),
    [("gptq", "qzeros"), ("gptq", "scales"), ("gptq-order", "g_idx"), ("awq", "qzeros"), ("packed-4", "weight_scale")],
)
def test_a_part_is_missing(tmp_path: Path, cfg: ModelConfig, recipe: str, ending: str) -> None:
    folder = folder_of(tmp_path, recipe)
    change(folder, **{ending: None})
    with pytest.raises(WeightsError, match=rf"model.safetensors: tensor {Q_PROJ}.{ending} is missing"):
        take_all(folder, cfg)


def test_a_part_of_another_type(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    change(folder, qweight=stored(folder, "qweight").float())
    with pytest.raises(WeightsError, match=rf"{Q_PROJ}.qweight is float32, expected int32"):
        take_all(folder, cfg)


def test_biases_of_zeros_are_no_biases(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    rows = stored(folder, "scales").shape[1]
    change(folder, bias=torch.zeros(rows, dtype=torch.float16))
    take_all(folder, cfg)
    change(folder, bias=torch.full((rows,), 0.5, dtype=torch.float16))
    with pytest.raises(WeightsError, match=rf"model.safetensors: tensor {Q_PROJ}.bias is not zero"):
        take_all(folder, cfg)


def test_a_stray_tensor_is_left_over(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    change(folder, odd=torch.zeros(2))
    with pytest.raises(WeightsError, match=rf"{Q_PROJ}.odd"):
        take_all(folder, cfg)


def test_a_plain_layer_among_packed_ones_is_plain(tmp_path: Path, cfg: ModelConfig) -> None:
    take_all(folder_of(tmp_path, plain=("down_proj", "layers.1.self_attn")), cfg)


def test_both_plain_and_packed(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    change(folder, weight=torch.zeros(8, 8))
    with pytest.raises(WeightsError, match=rf"tensor {Q_PROJ}.weight is there both plain and packed"):
        open_source(folder, cfg)


def test_a_truncated_file(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", size - 1024)
    with pytest.raises(WeightsError, match=rf"expects {size} bytes, the file has {size - 1024}"):
        take_all(folder, cfg)


def test_a_column_in_a_group_that_is_not_there(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path, "gptq-order")
    index = stored(folder, "g_idx")
    index[5] = 99
    change(folder, g_idx=index)
    with pytest.raises(WeightsError, match=rf"{Q_PROJ}.qweight cannot be unpacked"):
        take_all(folder, cfg)


def test_every_tensor_of_the_file_is_seen(tmp_path: Path, cfg: ModelConfig) -> None:
    """Names and shapes are those of the plain checkpoint, whatever is stored."""
    want = load_file(write_checkpoint(tmp_path / "want", FAMILY, fmt="safetensors") / "model.safetensors")
    for recipe in RECIPES:
        source = open_source(folder_of(tmp_path, recipe), cfg)
        assert isinstance(source, QuantizedSource)
        assert {n: tuple(t.shape) for n, t in want.items()} == {n: tuple(source.shape(n)) for n in source.names()}
        assert f"{Q_PROJ}.weight" in source
        assert f"{Q_PROJ}.qweight" not in source.names()


# ---- zero points of GPTQ


def without_version(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    set_config(folder, quantization_config={k: v for k, v in raw.items() if k != "checkpoint_format"})


def test_asymmetric_without_a_version_needs_the_flag(tmp_path: Path, cfg: ModelConfig) -> None:
    for recipe, flag in (("gptq-asym", "v1"), ("gptq-v2", "v2")):
        folder = folder_of(tmp_path, recipe)
        want = take_q(folder, cfg)
        without_version(folder)
        with pytest.raises(UnsupportedModel, match="--gptq-format v1"):
            open_source(folder, cfg)
        assert torch.equal(take_q(folder, cfg, flag), want)


def test_symmetric_without_a_version_is_the_first(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    without_version(folder)
    take_all(folder, cfg)
    change(folder, qzeros=torch.full_like(stored(folder, "qzeros"), 0x77777776))
    with pytest.raises(WeightsError, match="says symmetric, but the zero points are not all the middle one"):
        take_all(folder, cfg)


def test_symmetric_without_a_version_that_looks_like_the_second(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path)
    without_version(folder)
    state = load_file(folder / "model.safetensors")
    second = {n: t + 0x11111111 for n, t in state.items() if n.endswith("qzeros")}
    save_file(state | second, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="give --gptq-format v2"):
        take_all(folder, cfg)
    take_all(folder, cfg, "v2")


def test_the_flag_is_for_gptq_alone(tmp_path: Path, cfg: ModelConfig) -> None:
    for folder in (folder_of(tmp_path, "awq"), write_checkpoint(tmp_path / "plain", FAMILY, fmt="safetensors")):
        with pytest.raises(UsageError, match="is for GPTQ checkpoints"):
            open_source(folder, cfg, "v1")


# ---- what quantization_config may say


def said(folder: Path, config: dict[str, Any], name: str = "config.json") -> QuantConfig | None:
    (folder / name).write_text(json.dumps({"quantization_config": config} if name == "config.json" else config))
    return QuantConfig.read(folder)


GROUP = PACKED["config_groups"]["group_0"]
FP8_GROUP = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def packed(**weights: Any) -> dict[str, Any]:
    return PACKED | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPTQ | {"desc_act": True}, "gptq w4 g32 sym act-order"),
        (GPTQ | {"bits": 8, "group_size": -1, "sym": False}, "gptq w8 row asym"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {}}, "gptq w4 g128 sym"),
        (RECIPES["awq"].config, "awq w4 g32 asym"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq w4 g128 asym"),
        (packed(actorder="group"), "compressed-tensors w4 g32 sym act-order"),
        (packed(actorder="weight", symmetric=False), "compressed-tensors w4 g32 asym"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes nf4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes fp4"),
        (PACKED | {"format": "float-quantized", "config_groups": {"g": FP8_GROUP}}, "compressed-tensors fp8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    ],
)
def test_what_is_read(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    found = said(tmp_path, config)
    assert found is not None
    assert found.name == name


def test_files_beside_config_json(tmp_path: Path) -> None:
    old = {
        "bits": 4,
        "group_size": 128,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": True,
        "model_name_or_path": None,
    }
    gptq, awq = said(tmp_path, old, "quantize_config.json"), None
    assert gptq is not None
    assert (gptq.name, gptq.version) == ("gptq w4 g128 sym", None)
    (tmp_path / "quantize_config.json").unlink()
    awq = said(tmp_path, {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "quant_config.json")
    assert awq is not None
    assert awq.name == "awq w4 g64 asym"
    assert said(tmp_path, GPTQ).method == "gptq", "config.json comes first"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "mine", "bits": 4}, "method 'mine' is not supported; read are gptq, awq"),
        ({"bits": 4}, "method without a name"),
        (GPTQ | {"bits": 3}, "3 bits are not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin.* minicpm quantize"),
        (GPTQ | {"is_marlin_format": True}, "marlin"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "'bitblas'"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"pack_dtype": "int16"}, "int16"),
        (RECIPES["awq"].config | {"version": "gemv"}, "version 'gemv'"),
        (RECIPES["awq"].config | {"zero_point": False}, "without zero points"),
        (RECIPES["awq"].config | {"bits": 8}, "8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int3"}, "int3.*nf4"),
        (PACKED | {"format": "marlin-24"}, "marlin-24"),
        (PACKED | {"config_groups": {"a": GROUP, "b": GROUP}}, "2 config_groups"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (PACKED | {"quantization_status": "frozen"}, "frozen"),
        (packed(strategy="block"), "'block'"),
        (PACKED | {"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8}}}}, "weight-only"),
        (
            PACKED
            | {
                "format": "float-quantized",
                "config_groups": {"g": FP8_GROUP | {"input_activations": {"dynamic": False}}},
            },
            "fixed scales",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "in blocks"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "'static'"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        said(tmp_path, config)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "bits of the quantization is missing"),
        (GPTQ | {"bits": "4"}, "bits of the quantization is '4'"),
        (GPTQ | {"bits": True}, "bits of the quantization is True"),
        (GPTQ | {"sym": "yes"}, "sym of the quantization is 'yes'"),
        (GPTQ | {"quant_method": 4}, "quant_method of the quantization is 4"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        (PACKED | {"config_groups": None}, "config_groups"),
        (PACKED | {"config_groups": {"g": 3}}, "config_groups"),
        ("gptq", "quantization_config"),
    ],
)
def test_what_makes_no_sense(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        said(tmp_path, config)


def test_every_refusal_is_the_models_fault() -> None:
    assert all(issubclass(kind, MinicpmError) and kind.exit_code == 3 for kind in (UnsupportedModel, ConfigError))
