"""NF4, FP4 and LLM.int8 bit by bit against bitsandbytes' own functions."""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats import int8, nf4
from quant.formats.nf4_tables import nearest, nearest_nf4, table_of
from steps import relative_error

SHAPES = [(64, 64), (48, 96), (288, 576), (577, 128), (7, 10), (3, 33)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def weights(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def theirs(w: Tensor, kind: str, nested: bool = False) -> tuple[dict[str, Tensor], Any]:
    """The tensors that transformers saves for a layer, and bitsandbytes' state of them."""
    codes, state = bnb.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=nested)
    named = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return {"weight": codes} | named, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantizing_gives_bitsandbytes_files(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = weights(*shape, dtype)
    expected, _ = theirs(w, kind)
    mine = nf4.pack(nf4.quantize(w, kind=kind))
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], t) and mine[name].dtype == t.dtype for name, t in expected.items())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_gives_bitsandbytes_weights(dtype: torch.dtype, kind: str, nested: bool) -> None:
    tensors, state = theirs(weights(288, 576, dtype), kind, nested)
    read = nf4.unpack(tensors)
    assert torch.equal(read.dequantize(dtype), bnb.dequantize_4bit(tensors["weight"], state))
    again = nf4.pack(read)
    assert all(torch.equal(again[name], t) for name, t in tensors.items())


def test_blocks_that_run_across_rows() -> None:
    """bitsandbytes 0.50's dequantize_4bit for CPUs with AVX-512 is wrong here, so the formula stands in for it."""
    w = weights(50, 96, torch.float32)
    tensors, state = theirs(w, "nf4")
    codes = torch.cat((tensors["weight"] >> 4, tensors["weight"] & 15), -1).flatten().int()
    plain = state.code[codes] * state.absmax.repeat_interleave(64)
    assert torch.equal(nf4.unpack(tensors).dequantize(), plain.view(50, 96))
    assert relative_error(plain.view(50, 96), w.double()) < 0.11


@pytest.mark.parametrize("shape", [(50, 96), (64, 64), (7, 10)])
def test_chunks_of_unpacking_do_not_show(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = nf4.quantize(weights(*shape, torch.float32))
    whole = packed.dequantize()
    monkeypatch.setattr(nf4, "CHUNK", 128)
    assert torch.equal(packed.dequantize(), whole)


def test_a_last_block_that_is_shorter() -> None:
    w = weights(7, 10, torch.float32)
    tensors, _ = theirs(w, "nf4")
    assert relative_error(nf4.unpack(tensors).dequantize(), w.double()) < 0.11


def test_the_quick_search_of_nf4_is_the_plain_one() -> None:
    table = table_of("nf4")
    middles = (table[1:] + table[:-1]) / 2
    close = torch.cat([t.nextafter(torch.tensor(end)) for t in (middles, table) for end in (-1.0, 1.0)])
    edges = torch.arange(-16, 17) / 16
    values = torch.cat((table, middles, close, edges, torch.linspace(-1, 1, 100_001)))
    assert torch.equal(nearest_nf4(values), nearest(table, values))


def test_nested_scales() -> None:
    """The reference is bitsandbytes' search in full precision (its float32 one looks codes up on a coarser grid)."""
    absmax = weights(1, 1000, torch.float32).abs()[0]
    nested = nf4.nest(absmax)
    table = bnb.create_dynamic_map()
    centred = (absmax - absmax.mean())[:768].double()
    codes, outer = torch.ops.bitsandbytes.quantize_blockwise(centred, table, 256)
    assert torch.equal(nested.codes[:768], codes)
    assert torch.equal(nested.absmax[:3], outer)
    assert torch.equal(nested.table, table)
    assert relative_error(nested.plain(), absmax.double()) < 0.01


def test_nested_files_differ_from_bitsandbytes_by_steps_of_a_few_scales() -> None:
    w = weights(288, 576, torch.bfloat16)
    expected, _ = theirs(w, "nf4", nested=True)
    mine = nf4.pack(nf4.quantize(w, nested=True))
    assert mine.keys() == expected.keys()
    scales = expected.pop("weight.absmax").int() - mine["weight.absmax"].int()
    assert scales.abs().max() <= 1
    assert scales.count_nonzero() < 0.01 * scales.numel()
    assert all(torch.equal(mine[name], t) for name, t in expected.items())


def test_zeros() -> None:
    w = torch.zeros(2, 64)
    assert torch.equal(nf4.quantize(w).dequantize(), w)
    assert torch.equal(nf4.quantize(w, nested=True).dequantize(), w)
    assert torch.equal(int8.quantize(w).dequantize(), w)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_and_joining(nested: bool) -> None:
    packed = nf4.quantize(weights(40, 128, torch.float32), nested=nested)
    index = torch.tensor([3, 3, 39, 0])
    assert torch.equal(packed.rows(index).dequantize(), packed.dequantize()[index])
    a, b = packed.rows(slice(0, 7)), packed.rows(slice(7, 40))
    assert a.like(b)
    assert torch.equal(nf4.NF4.cat([a, b]).dequantize(), packed.dequantize())
    assert packed.like(packed) == (not nested)
    straddling = nf4.quantize(weights(64, 96, torch.float32))
    assert torch.equal(nf4.NF4.cat([straddling, straddling]).dequantize(), straddling.dequantize().repeat(2, 1))
    with pytest.raises(FormatError, match="96"):
        straddling.rows(slice(0, 2))


def test_sizes() -> None:
    w = weights(64, 1024, torch.float32)
    assert nf4.quantize(w).nbytes == w.numel() * 4.5 / 8
    nested = nf4.quantize(w, nested=True)
    assert nested.nbytes == w.numel() // 2 + w.numel() // 64 + 4 * 4 + 4 * 256
    assert int8.quantize(w).nbytes == w.numel() + 4 * 64


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors, _ = theirs(weights(8, 64, torch.float32), "nf4", nested=True)
    if tensor is None:
        del tensors[name]
        return tensors
    return tensors | {name: tensor}


def state_with(**fields: object) -> Tensor:
    state = json.loads(bytes(changed("x", torch.empty(0))[nf4.STATE + "nf4"].tolist()))
    return torch.tensor(list(json.dumps(state | fields).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (nf4.STATE + "nf4", None, "quant_state"),
        (nf4.STATE + "nf4", torch.tensor([1, 2, 3], dtype=torch.uint8), "not the state"),
        (nf4.STATE + "nf4", state_with(shape=[8, 65]), "8 x 65"),
        (nf4.STATE + "nf4", state_with(shape=[8]), "shape"),
        (nf4.STATE + "nf4", state_with(quant_type="af4"), "af4"),
        (nf4.STATE + "nf4", state_with(dtype="none such"), "not the state"),
        ("weight", None, "lack weight;"),
        ("weight.absmax", torch.zeros(3), "3 scales"),
        ("weight.nested_absmax", None, "nested_absmax"),
        ("weight.quant_map", torch.linspace(-1, 1, 16), "table"),
    ],
)
def test_files_that_do_not_match_are_refused(name: str, tensor: Tensor | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        nf4.unpack(changed(name, tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_bitsandbytes(dtype: torch.dtype) -> None:
    w = weights(50, 96, dtype)
    codes, absmax, _ = bnb.int8_vectorwise_quant(w.half())
    mine = int8.quantize(w)
    assert torch.equal(mine.codes, codes)
    assert torch.equal(mine.absmax, absmax)
    assert torch.equal(mine.dequantize(), bnb.int8_vectorwise_dequant(codes, absmax))
    tensors = int8.pack(mine)
    assert torch.equal(int8.unpack(tensors).dequantize(), mine.dequantize())
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "weight": ((50, 96), torch.int8),
        "SCB": ((50,), torch.float32),
        "weight_format": ((), torch.uint8),
    }


def test_int8_rows_and_joining() -> None:
    packed = int8.quantize(weights(20, 30, torch.float32))
    parts = [packed.rows(slice(0, 7)), packed.rows(slice(7, 20))]
    assert parts[0].like(parts[1])
    assert torch.equal(int8.Int8.cat(parts).dequantize(), packed.dequantize())


def test_int8_files_that_do_not_match_are_refused() -> None:
    tensors = int8.pack(int8.quantize(weights(8, 64, torch.float32)))
    for change in (
        {"weight": tensors["weight"].float()},
        {"SCB": tensors["SCB"][:-1]},
        {"weight_format": torch.tensor(1, dtype=torch.uint8)},
    ):
        with pytest.raises(FormatError):
            int8.unpack(tensors | change)
