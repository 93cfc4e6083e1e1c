"""GGUF's block formats against the `gguf` package's own arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quant.pack import GroupInt, from_gguf

KINDS = ("Q4_0", "Q4_1", "Q8_0")


def blocks(kind: str, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """A quantized random matrix: its raw bytes and gguf's own float32 reading of them."""
    weights = np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)
    kind_id = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(weights, kind_id)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, kind_id))


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (64, 576)])
@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_is_exact(kind: str, shape: tuple[int, int]) -> None:
    raw, expected = blocks(kind, *shape)
    packed = from_gguf(kind, torch.from_numpy(raw.copy()), shape)
    assert packed.shape == shape
    assert torch.equal(packed.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_cat(kind: str) -> None:
    raw, expected = blocks(kind, 12, 64)
    packed = from_gguf(kind, torch.from_numpy(raw.copy()), (12, 64))
    order = torch.tensor([3, 0, 11, 11, 5])
    assert torch.equal(packed.rows(order).dequantize(), expected[order])
    joined = GroupInt.cat([packed.rows(slice(0, 5)), packed.rows(slice(5, 12))])
    assert torch.equal(joined.dequantize(), expected)


def test_size_is_the_file_format_s() -> None:
    raw, _ = blocks("Q4_1", 64, 576)
    assert from_gguf("Q4_1", torch.from_numpy(raw.copy()), (64, 576)).nbytes == raw.nbytes


def test_formats_that_do_not_join() -> None:
    a, b = (from_gguf(k, torch.from_numpy(blocks(k, 4, 64)[0].copy()), (4, 64)) for k in ("Q4_1", "Q8_0"))
    assert not a.like(b)
    assert a.like(a.rows(slice(0, 2)))
