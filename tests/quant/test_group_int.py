"""Zero points and column orders of packed integers against the formula, column by column."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from textbook import random_groups, same

from quant import pack
from quant.pack import GroupInt


def formula(packed: GroupInt) -> torch.Tensor:
    """W[n, order[j]] = scale * (code - zero) + offset, in float32."""
    n, k = packed.shape
    codes = packed.integers().int()
    w = torch.empty(n, k)
    for j in range(k):
        group = j // packed.group
        zero = 0 if packed.zero is None else packed.zero[:, group].int()
        column = packed.scale[:, group].float() * (codes[:, j] - zero)
        if packed.offset is not None:
            column = column + packed.offset[:, group].float()
        w[:, j if packed.order is None else packed.order[j]] = column
    return w


CASES = [
    pytest.param(bits, group, shuffled, id=f"{bits}-{group}-{shuffled}")
    for bits in (4, 8)
    for group in (32, 96, 192, -1)
    for shuffled in (False, True)
]


@pytest.mark.parametrize(("bits", "group", "shuffled"), CASES)
def test_dequantize(bits: int, group: int, shuffled: bool) -> None:
    packed = random_groups(bits, 11, 576, group, shuffled=shuffled, least=0)
    assert packed.group == (576 if group == -1 else group)
    assert torch.equal(packed.dequantize(), formula(packed))
    shifted = replace(packed, offset=packed.scale * 3)
    assert torch.equal(shifted.dequantize(), formula(shifted))


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_of_unpacking_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_groups(bits, 23, 96, 32, shuffled=True)
    whole = packed.dequantize()
    monkeypatch.setattr(pack, "CHUNK", 960)
    assert torch.equal(packed.dequantize(), whole)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_cat_and_devices_keep_zero_points_and_orders(bits: int) -> None:
    packed = random_groups(bits, 12, 96, 32, shuffled=True)
    index = torch.tensor([3, 0, 11, 11])
    assert torch.equal(packed.rows(index).dequantize(), packed.dequantize()[index])
    parts = [packed.rows(slice(0, 5)), packed.rows(slice(5, 12))]
    assert parts[0].like(parts[1])
    assert same(GroupInt.cat(parts), packed)
    assert same(packed.to(torch.device("cpu")), packed)
    assert packed.to(torch.device("meta")).dequantize().shape == (12, 96)


def test_what_does_not_join() -> None:
    packed = random_groups(4, 8, 96, 32, shuffled=True)
    others = [
        replace(packed, order=None),
        replace(packed, order=packed.order.flip(0)),
        replace(packed, zero=None),
        replace(packed, offset=packed.scale),
        replace(packed, scale=packed.scale.bfloat16()),
        random_groups(8, 8, 96, 32),
        random_groups(4, 8, 96, 96),
        "a string",
    ]
    assert not any(packed.like(other) for other in others)
    assert packed.like(replace(packed, order=packed.order.clone()))


@pytest.mark.parametrize("bits", [4, 8])
def test_unsigned_codes_there_and_back(bits: int) -> None:
    packed = random_groups(bits, 9, 64, 16, least=0)
    codes, zero = packed.unsigned()
    assert codes.dtype == zero.dtype == torch.uint8
    assert same(GroupInt.from_unsigned(bits, 16, codes, packed.scale, zero), packed)


@pytest.mark.parametrize("part", [slice(1, 17), slice(2, 18)])
def test_codes_may_be_a_view_into_others(part: slice) -> None:
    codes = torch.randint(0, 16, (1, 20), dtype=torch.uint8)
    packed = GroupInt.from_unsigned(4, 16, codes[:, part], torch.ones(1, 1), torch.zeros(1, 1))
    assert torch.equal(packed.dequantize(), codes[:, part].float())


@pytest.mark.parametrize("bits", [4, 8])
def test_no_zero_points_are_the_middle(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 32))
    packed = GroupInt.from_unsigned(bits, 32, codes, torch.ones(4, 1))
    assert torch.equal(packed.dequantize(), codes.float() - 2 ** (bits - 1))
    assert packed.symmetric
    assert packed.unsigned()[1].eq(2 ** (bits - 1)).all()
    assert not random_groups(bits, 4, 32, 32).symmetric
    assert not replace(packed, offset=packed.scale).symmetric


def test_smaller_groups_of_the_same_weights() -> None:
    packed = random_groups(4, 8, 384, 192, shuffled=True)
    smaller = packed.regrouped(64)
    assert (smaller.group, smaller.scale.shape) == (64, (8, 6))
    assert torch.equal(smaller.dequantize(), packed.dequantize())


def test_size() -> None:
    packed = random_groups(4, 8, 96, 32, shuffled=True)
    assert packed.nbytes == 8 * 48 + 8 * 3 * (2 + 1) + 96 * 8
