"""The device layout holds exactly the weights it was made of, in the bit positions that kernels read."""

from __future__ import annotations

import pytest
import torch

from quant.kernels.layout import pack
from quant.pack import GroupInt, from_gguf
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error


def unsigned(bits: int, n: int, k: int, group: int, zero: bool) -> GroupInt:
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (n, k), generator=g)
    scale = (torch.rand(n, k // group, generator=g) * 0.02 + 0.001).half()
    zeros = torch.randint(0, 2**bits, (n, k // group), generator=g) if zero else None
    return GroupInt.from_unsigned(bits, group, codes, scale, zeros)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_weights(bits: int, zero: bool) -> None:
    packed = unsigned(bits, 33, 192, 96, zero)
    device = pack(packed)
    assert (device.N, device.K, device.group, device.bits) == (33, 192, 96, bits)
    assert (device.zero is not None) == zero
    assert torch.equal(device.dequantize(), packed.dequantize())
    assert torch.equal(device.codes(), packed.unsigned()[0])


def test_four_bits_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]])
    word = int(pack(GroupInt.from_unsigned(4, 8, codes, torch.ones(1, 1))).words[0, 0]) & 0xFFFFFFFF
    pairs = [(word >> 4 * i) & 0x000F000F for i in range(4)]
    assert [(p & 0xFFFF, p >> 16) for p in pairs] == [(1, 2), (3, 4), (5, 6), (7, 15)]


def test_eight_bits_by_hand() -> None:
    codes = torch.tensor([[1, 130, 3, 255]])
    word = int(pack(GroupInt.from_unsigned(8, 4, codes, torch.ones(1, 1))).words[0, 0]) & 0xFFFFFFFF
    pairs = [(word >> 8 * i) & 0x00FF00FF for i in range(2)]
    assert [(p & 0xFFFF, p >> 16) for p in pairs] == [(1, 130), (3, 255)]


@pytest.mark.parametrize(("kind", "width"), [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34)])
def test_blocks_of_gguf(kind: str, width: int) -> None:
    g = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (7, 5, width), generator=g, dtype=torch.uint8)
    for place in range(0, 4 if kind == "Q4_1" else 2, 2):
        raw[..., place : place + 2] = torch.randn(7, 5, 1, generator=g).half().view(torch.uint8)
    packed = from_gguf(kind, raw.flatten(1), (7, 160))
    device = pack(packed)
    assert (device.shift is not None) == (kind == "Q4_1")
    assert relative_error(device.dequantize(), packed.dequantize(torch.float64)) < 1e-6


def test_signed_codes_with_an_offset_and_a_zero() -> None:
    whole = unsigned(8, 5, 64, 32, zero=True)
    packed = GroupInt(8, 32, whole.codes, whole.scale, torch.randn(5, 2).half(), whole.zero)
    assert relative_error(pack(packed).dequantize(), packed.dequantize(torch.float64)) < 1e-5


def test_codes_of_a_shift_that_start_at_zero() -> None:
    whole = unsigned(4, 5, 64, 32, zero=False)
    packed = GroupInt(4, 32, whole.codes, whole.scale, None, None)
    assert torch.equal(pack(packed).dequantize(), packed.dequantize())


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = rtn(torch.randn(50, 128), Scheme("int", 4, 64))
    assert isinstance(packed, GroupInt)
    whole = pack(packed).words
    monkeypatch.setattr("quant.kernels.layout.CHUNK_WORDS", 100)
    assert torch.equal(pack(packed).words, whole)
