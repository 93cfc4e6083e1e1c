"""Tensors out of GGUF files against the weights they were written from and against gguf.quants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from checkpoints import FAMILIES, checkpoint_config, is_tied, state_dict, write_checkpoint
from minicpm_cli.errors import UnsupportedModel, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf_names import huggingface_names
from minicpm_cli.model.gguf_source import CHUNK, rotate_half_rows
from minicpm_cli.model.source import open_source
from quant.pack import GroupInt

PACKED = ("Q4_0", "Q4_1", "Q8_0")


def config_for(family: str, **options: Any) -> ModelConfig:
    return ModelConfig.from_hf(checkpoint_config(family, **options))


def wanted(family: str, **options: Any) -> dict[str, torch.Tensor]:
    config = checkpoint_config(family, **options)
    state = state_dict(family, dtype=torch.float32, **options)
    return {n: t for n, t in state.items() if not (n == "lm_head.weight" and is_tied(config))}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_under_its_own_name(tmp_path: Path, family: str) -> None:
    path = write_checkpoint(tmp_path, family, fmt="gguf", quant="F32", dtype=torch.float32)
    source, state = open_source(path, config_for(family)), wanted(family)
    assert source.names() == state.keys()
    for name, tensor in state.items():
        assert name in source
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.take(name, tuple(tensor.shape)), tensor), name
    source.finish()


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["minicpm-moe-8x2b", "minicpm4-8b"])
def test_quantized_types_without_loss(tmp_path: Path, family: str, quant: str) -> None:
    """Bit for bit what gguf.quants makes of the same blocks, in the rows' original order."""
    path = write_checkpoint(tmp_path, family, fmt="gguf", quant=quant, dtype=torch.float32)
    source = open_source(path, config_for(family))
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in wanted(family).items():
        got = source.take(name, tuple(tensor.shape))
        if isinstance(got, GroupInt):
            assert quant in PACKED
            got = got.dequantize()
        if tensor.ndim == 1:
            assert torch.equal(got, tensor)
        elif quant != "F16" and tensor.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(tensor.numpy(), kind)
            assert np.array_equal(got.float().numpy(), gguf.quants.dequantize(blocks, kind)), name
        else:
            assert torch.equal(got, tensor.half())
    source.finish()


def test_permutation_is_the_inverse_of_llama_cpps() -> None:
    """Its converter: reshape(heads, 2, half, ...).swapaxes(1, 2), at sizes where a mix-up of heads shows."""
    for rows, heads in ((12, 3), (256, 16), (64, 1), (10, 5)):
        original = np.arange(rows)
        theirs = original.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)
        assert np.array_equal(theirs[rotate_half_rows(rows, heads).numpy()], original)


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Any bytes are valid blocks as long as their float16 scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}[kind]:
        raw[..., at : at + 2] = rng.uniform(0.001, 0.01, (*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def write_one(path: Path, name: str, raw: np.ndarray, kind: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_other_types_are_unpacked(tmp_path: Path, kind: str) -> None:
    raw = random_blocks(kind, 64, 512)
    source = open_source(write_one(tmp_path / "k.gguf", "blk.0.attn_q.weight", raw, kind), config_for("minicpm5-1b"))
    got = source.take("model.layers.0.self_attn.q_proj.weight", (64, 512))
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), want[rotate_half_rows(64, 16).numpy()])


def test_unpacking_in_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicpm_cli.model.gguf_source.CHUNK", 7 * 512)
    assert CHUNK > 7 * 512
    raw = random_blocks("Q6_K", 50, 512)
    source = open_source(write_one(tmp_path / "k.gguf", "output.weight", raw, "Q6_K"), config_for("minicpm5-1b"))
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K)
    assert np.array_equal(source.take("lm_head.weight", (50, 512)).numpy(), want)


def test_a_stack_of_k_quantized_experts(tmp_path: Path) -> None:
    raw = random_blocks("Q4_K", 3 * 16, 256).reshape(3, 16, -1)
    path = write_one(tmp_path / "e.gguf", "blk.1.ffn_down_exps.weight", raw, "Q4_K")
    source = open_source(path, config_for("minicpm-moe-8x2b"))
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    for e in range(3):
        got = source.take(f"model.layers.1.mlp.experts.{e}.w2.weight", (16, 256))
        assert np.array_equal(got.numpy(), want[e])
    source.finish()


@pytest.mark.parametrize(("kind", "bytes_a_row"), [("Q8_1", 40), ("Q8_K", 292)])
def test_types_that_nobody_can_unpack(tmp_path: Path, kind: str, bytes_a_row: int) -> None:
    raw = np.zeros((4, bytes_a_row), np.uint8)
    source = open_source(write_one(tmp_path / "x.gguf", "output.weight", raw, kind), config_for("minicpm5-1b"))
    with pytest.raises(UnsupportedModel, match=f"output.weight is of ggml type {kind}"):
        source.take("lm_head.weight", source.shape("lm_head.weight"))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.arange(192, dtype=np.int32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(WeightsError, match=r"output_norm.weight is I32, expected floats"):
        open_source(tmp_path / "i.gguf", config_for("minicpm5-1b")).take("model.norm.weight", (192,))


def test_names() -> None:
    assert [n for n, _ in huggingface_names("blk.3.attn_kv_a_mqa.weight", 1)] == [
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    ]
    assert [n for n, _ in huggingface_names("blk.0.ffn_up.5.weight", 1)] == ["model.layers.0.mlp.experts.5.w3.weight"]
    stacked = list(huggingface_names("blk.2.ffn_gate_exps.weight", 2))
    assert [(n, p.expert) for n, p in stacked] == [
        ("model.layers.2.mlp.experts.0.w1.weight", 0),
        ("model.layers.2.mlp.experts.1.w1.weight", 1),
    ]
    for odd in ("blk.0.attn_q.bias", "blk.0.ffn_norm_exps.weight", "blk.x.attn_q.weight", "v.blk.0.attn_q.weight"):
        assert [n for n, _ in huggingface_names(odd, 1)] == [odd]


def test_shape_missing_and_left_over(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm4-0.5b", fmt="gguf")
    source = open_source(path, config_for("minicpm4-0.5b"))
    with pytest.raises(WeightsError) as caught:
        source.take("model.layers.0.mlp.up_proj.weight", (1024, 512))
    for part in (str(path), "mlp.up_proj", "blk.0.ffn_up", "[1024, 256]", "[1024, 512]"):
        assert part in str(caught.value)
    with pytest.raises(WeightsError, match=r"no tensor lm_head.weight"):
        source.take("lm_head.weight", (416, 256))
    with pytest.raises(WeightsError, match=r"no tensor lm_head.weight"):
        source.shape("lm_head.weight")
    with pytest.raises(WeightsError, match="holds 19 tensors"):
        source.finish()


def test_views_outlive_the_source(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm5-1b", fmt="gguf", quant="F32", dtype=torch.float32)
    source = open_source(path, config_for("minicpm5-1b"))
    kept = source.take("model.norm.weight", (192,))
    for name in source.names():
        source.ignore(name)
    source.finish()
    del source
    assert torch.equal(kept, wanted("minicpm5-1b")["model.norm.weight"])


def test_the_file_is_never_written(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm5-1b", fmt="gguf", quant="F32")
    before = path.read_bytes()
    open_source(path, config_for("minicpm5-1b")).take("model.norm.weight", (192,)).zero_()
    assert path.read_bytes() == before


def test_folder_with_gguf_only(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm5-1b", fmt="gguf")
    cfg = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert "model.norm.weight" in open_source(tmp_path, cfg)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(WeightsError, match=r"2 GGUF files.*other.gguf"):
        open_source(tmp_path, cfg)
