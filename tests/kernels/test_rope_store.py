"""Rotation and storing as one kernel against the plain-torch form, for plain caches and for codes with scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.cache import LayerCache
from steps import relative_error

pytest.importorskip("triton", reason="the kernels are written in it")
from minicpm_cli.kernels.rope_store import rope_, rope_store, store

PAGE, PAGES = 4, 4
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDED = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 5e-3}  # the interpreter cuts bf16 off
HEADS = {"mha": (3, 3, 16, 16), "gqa": (6, 2, 24, 24), "partial": (9, 1, 20, 6), "many": (21, 7, 8, 8)}  # Hq, Hkv, D, R


def cache_of(heads: int, dim: int, dtype: torch.dtype, device: str) -> LayerCache:
    rows = torch.zeros(PAGES * PAGE, heads, dim, device=device).to(dtype)
    pages = rows.view(PAGES, PAGE, heads, dim)
    sides = torch.zeros(PAGES, heads, PAGE, dtype=torch.float16, device=device)
    scales = sides.transpose(1, 2) if dtype.itemsize == 1 else None
    return LayerCache(rows, pages[:, :, : heads // 2], pages[:, :, heads // 2 :], scales)


def values(cache: LayerCache) -> Tensor:
    return cache.rows.float() * (1.0 if cache.scales is None else cache.scales.float().flatten(0, 1).unsqueeze(-1))


def check(mine: LayerCache, plain: LayerCache, rows: Tensor, slots: Tensor) -> None:
    """int8 as the reference has it, but where a quotient rounds the other way; fp8 as close to `rows` as that is.

    The interpreter's fp8 does not carry into the exponent when it rounds up, and so it chooses other scales.
    """
    ours, theirs = (relative_error(values(cache)[slots], rows) for cache in (mine, plain))
    if mine.rows.dtype == torch.int8:
        assert relative_error(values(mine), values(plain)) < 1e-3
    elif rows.is_cuda:
        assert abs(ours - theirs) < 1e-3
    else:
        assert ours < 0.1


def inputs(shape: str, tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hq, hkv, dim, rotated = HEADS[shape]
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, hq + 2 * hkv, dim, generator=generator).to(dtype).to(device)
    angles = (torch.rand(tokens, 1, rotated // 2, generator=generator) * 6).to(device)
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:tokens].to(device)
    return qkv, angles.cos(), angles.sin(), slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", HEADS)
def test_rope_store(shape: str, dtype: torch.dtype, kernel_device: str) -> None:
    hq, hkv, dim, _ = HEADS[shape]
    qkv, cos, sin, slots = inputs(shape, 7, dtype, kernel_device)
    mine, plain = (cache_of(2 * hkv, dim, dtype, kernel_device) for _ in range(2))
    expected = qkv.double()
    reference.rope_(expected[:, : hq + hkv], cos.double(), sin.double())
    turned = qkv.clone()
    rope_(turned[:, : hq + hkv], cos, sin)
    assert relative_error(turned, expected) < ROUNDED[dtype]
    rope_store(qkv, cos, sin, hq, mine, slots)
    reference.store(turned[:, hq:], plain, slots)  # the cache holds exactly what the rotated rows would
    assert torch.equal(mine.rows, plain.rows)
    assert torch.equal(qkv[:, :hq], turned[:, :hq])


@pytest.mark.parametrize("codes", [FP8, torch.int8])
@pytest.mark.parametrize("shape", HEADS)
def test_codes(shape: str, codes: torch.dtype, kernel_device: str) -> None:
    hq, hkv, dim, _ = HEADS[shape]
    qkv, cos, sin, slots = inputs(shape, 7, torch.float32, kernel_device)
    qkv[3, hq:] = 0.0
    mine, plain = (cache_of(2 * hkv, dim, codes, kernel_device) for _ in range(2))
    rope_store(qkv, cos, sin, hq, mine, slots)
    rope_(qkv[:, hq : hq + hkv], cos, sin)
    reference.store(qkv[:, hq:], plain, slots)
    assert mine.scales is not None
    assert (mine.scales.flatten(0, 1)[slots[3]] == 1.0).all()
    check(mine, plain, qkv[:, hq:], slots)


@pytest.mark.parametrize("codes", [None, FP8, torch.int8])
@pytest.mark.parametrize("shape", HEADS)
def test_what_is_cached_may_stand_in_the_rows(shape: str, codes: torch.dtype | None, kernel_device: str) -> None:
    hq, hkv, dim, _ = HEADS[shape]
    qkv, cos, sin, slots = inputs(shape, 7, torch.float16, kernel_device)
    cache, plain = (cache_of(2 * hkv, dim, codes or torch.float16, kernel_device) for _ in range(2))
    there = qkv.clone()
    rope_store(there, cos, sin, hq, cache, slots, back=True)
    rope_store(qkv, cos, sin, hq, plain, slots)
    assert torch.equal(values(cache), values(plain))
    assert torch.equal(there[:, :hq], qkv[:, :hq])
    assert torch.equal(there[:, hq:], values(cache)[slots].half())


@pytest.mark.parametrize("codes", [None, FP8, torch.int8])
def test_store(codes: torch.dtype | None, kernel_device: str) -> None:
    """MLA's rows: one head a token, and an odd width."""
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(5, 1, 30, generator=generator).half().to(kernel_device)
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:5].to(kernel_device)
    mine, plain = (cache_of(1, 25, codes or torch.float16, kernel_device) for _ in range(2))
    store(wide[..., 2:27], mine, slots)
    reference.store(wide[..., 2:27], plain, slots)
    if codes is None:
        assert torch.equal(mine.rows, plain.rows)
    else:
        check(mine, plain, wide[..., 2:27], slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_a_part_of_wider_rows(dtype: torch.dtype, kernel_device: str) -> None:
    x = torch.randn(4, 11, 12, generator=torch.Generator().manual_seed(5)).to(dtype).to(kernel_device)
    angles = torch.rand(4, 1, 4, device=kernel_device) * 6
    expected = x.double()
    reference.rope_(expected[:, :9], angles.double().cos(), angles.double().sin())
    rope_(x[:, :9], angles.cos(), angles.sin())
    assert relative_error(x, expected) < ROUNDED[dtype]
