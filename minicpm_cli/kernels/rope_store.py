"""Rotary embedding and the way into the cache, one launch for a step's tokens: what is rotated is stored at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.cache import LARGEST, LayerCache
from minicpm_cli.kernels.launch import Remembered, dependent, early

FP8_STEPS = tl.constexpr(7)  # as in FP8_PEAKS: 448, 416 .. 256
TO_INT = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to a whole number, halves to even


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [T, H, D], [T, 1, R/2] float32
    """Rotates the last R elements of every head in place."""
    tokens, heads, dim = x.shape
    if tokens:
        _launch(x, cos, sin, heads, heads, None, None, (tokens, heads), dim)


def rope_store(
    qkv: Tensor,  # [T, Hq + 2 Hkv, D]
    cos: Tensor,  # [T, 1, R/2] float32
    sin: Tensor,
    heads: int,  # Hq
    cache: LayerCache,
    slots: Tensor,  # [T] int64
    *,
    back: bool = False,
) -> None:
    """Rotates queries in place, and puts rotated keys and values into the cache.

    With `back` qkv, too, holds them then as the cache does, rounded once more where that keeps codes.
    """
    tokens, every, dim = qkv.shape
    rotated = heads + cache.k.shape[2]
    if tokens:
        _launch(qkv, cos, sin, heads, rotated, cache, slots, (tokens, every), dim, back)


def store(rows: Tensor, cache: LayerCache, slots: Tensor) -> None:  # [T, C, D], [T] int64
    """The tokens' rows of heads, as the cache keeps them."""
    tokens, heads, dim = rows.shape
    if tokens:
        _launch(rows, None, None, 0, 0, cache, slots, (tokens, heads), dim)


def _launch(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    kept: int,  # heads that do not go to the cache
    rotated: int,
    cache: LayerCache | None,
    slots: Tensor | None,
    grid: tuple[int, int],
    dim: int,
    back: bool = False,
) -> None:
    whole = cache is None or cache.rows.dtype != torch.float8_e4m3fn
    per, warps = shape_for(grid[0], whole)
    grid = grid[0], triton.cdiv(grid[1], per)
    half = cos.shape[-1] if cos is not None else dim // 2
    scales = cache.scales if cache else None
    rows = cache.rows if cache else None
    _rope_store[grid](
        x, cos, sin, rows, scales, slots, x.shape[1], kept, rotated, x.stride(0), x.stride(1), dim,
        rows.stride(0) if rows is not None else 0, scales.stride(0) if scales is not None else 0,
        PAGE=scales.shape[1] if scales is not None else 1,
        half=half, half_pad=triton.next_power_of_2(half), rest=dim - 2 * half,
        rest_pad=triton.next_power_of_2(max(dim - 2 * half, 1)),
        largest=LARGEST[rows.dtype] if scales is not None and rows is not None else 0.0,
        WHOLE=scales is not None and rows is not None and rows.dtype == torch.int8, EARLY=early(x), BACK=back,
        HEADS=min(per, triton.next_power_of_2(x.shape[1])), num_warps=warps, **dependent(x),
    )  # fmt: skip


def shape_for(tokens: int, whole: bool) -> tuple[int, int]:
    """Heads of a program, and its warps; `whole`: no scale is sought.

    8,192 tokens of 108 heads of 64 took an H200 66 us of bf16, 76 of int8 and 127 of fp8.
    """
    if tokens <= 16:
        return 16, 4
    return (32, 4) if whole else (16, 2)


@triton.jit
def _peak(x):
    return tl.max(tl.abs(x), 1)


@triton.jit
def _scale(peak, code):
    scale = (peak / code).to(tl.float16)
    return tl.where(scale == 0.0, 1.0, scale.to(tl.float32))


@triton.jit
def _codes(x, scale, largest: tl.constexpr, WHOLE: tl.constexpr):
    scaled = tl.minimum(tl.maximum(x / scale[:, None], -largest), largest)
    return (scaled + TO_INT) - TO_INT if WHOLE else scaled


@triton.jit
def _fp8_error(x, scale):
    """The sum of squared errors, in units of the scale."""
    scaled = x * (1.0 / scale)[:, None]
    error = scaled.to(tl.float8e4nv).to(tl.float32) - scaled
    return tl.sum(error * error, 1)


@triton.jit
def _row_error(a, b, whole, scale, rest: tl.constexpr):
    error = _fp8_error(a, scale) + _fp8_error(b, scale)
    if rest > 0:
        error += _fp8_error(whole, scale)
    return error * scale * scale


@triton.jit
def _best_scale(a, b, whole, rest: tl.constexpr, largest: tl.constexpr, WHOLE: tl.constexpr):
    """Of each head, as minicpm_cli.kernels.cache.encode chooses it."""
    peak = tl.maximum(_peak(a), _peak(b))
    if rest > 0:
        peak = tl.maximum(peak, _peak(whole))
    scale = _scale(peak, largest)
    if not WHOLE:
        least = _row_error(a, b, whole, scale, rest)
        for step in tl.static_range(1, FP8_STEPS):
            other = _scale(peak, largest - 32.0 * step)
            error = _row_error(a, b, whole, other, rest)
            scale = tl.where(error < least, other, scale)
            least = tl.minimum(error, least)
    return scale


@Remembered
@triton.jit(do_not_specialize_on_alignment=["slots"])  # a part of a larger buffer, anywhere in it
def _rope_store(
    x, cos, sin, rows, scales, slots, heads, kept, rotated, x_stride, head_stride, dim, row_stride, scale_stride,
    PAGE: tl.constexpr, half: tl.constexpr, half_pad: tl.constexpr, rest: tl.constexpr, rest_pad: tl.constexpr,
    largest: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, BACK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """A token's HEADS heads, each as what is not rotated (rest), and the two halves that are."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, half_pad)
    inside = (head[:, None] < heads) & (i[None, :] < half)
    a_at = rest + i[None, :]
    own = x + token * x_stride + head[:, None] * head_stride
    if EARLY:
        tl.extra.cuda.gdc_wait()
    a = tl.load(own + a_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(own + a_at + half, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        turning = inside & (head[:, None] < rotated)
        c = tl.load(cos + token * half + i, mask=i < half, other=1.0)[None, :]
        s = tl.load(sin + token * half + i, mask=i < half, other=0.0)[None, :]
        c, s = tl.where(turning, c, 1.0), tl.where(turning, s, 0.0)
        # rounded here, so that the cache holds what attention's inputs hold
        a, b = a * c - b * s, b * c + a * s
        a, b = a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)
        mine = turning & (head[:, None] < kept)
        tl.store(own + a_at, a, mask=mine)
        tl.store(own + a_at + half, b, mask=mine)
        a, b = a.to(tl.float32), b.to(tl.float32)
    if rows is not None:
        slot = tl.load(slots + token)
        there = rows + slot * row_stride + (head[:, None] - kept) * dim
        stored = inside & (head[:, None] >= kept)
        whole, scale = a, tl.full((HEADS,), 1.0, tl.float32)
        if rest > 0:
            r = tl.arange(0, rest_pad)
            held = (head[:, None] < heads) & (head[:, None] >= kept) & (r[None, :] < rest)
            whole = tl.load(own + r[None, :], mask=held, other=0.0).to(tl.float32)
        if scales is not None:  # noqa: SIM102 - the first is known when it is compiled
            if tl.program_id(1) * HEADS + HEADS > kept:  # of queries alone nothing is stored
                scale = _best_scale(a, b, whole, rest, largest, WHOLE)
                at = scales + slot // PAGE * scale_stride + (head - kept) * PAGE + slot % PAGE
                tl.store(at, scale.to(tl.float16), mask=(head >= kept) & (head < heads))
                a, b = _codes(a, scale, largest, WHOLE), _codes(b, scale, largest, WHOLE)
                if rest > 0:
                    whole = _codes(whole, scale, largest, WHOLE)
        a, b = a.to(rows.dtype.element_ty), b.to(rows.dtype.element_ty)
        tl.store(there + a_at, a, mask=stored)
        tl.store(there + a_at + half, b, mask=stored)
        if BACK:
            tl.store(own + a_at, a.to(tl.float32) * scale[:, None], mask=stored)
            tl.store(own + a_at + half, b.to(tl.float32) * scale[:, None], mask=stored)
        if rest > 0:
            whole = whole.to(rows.dtype.element_ty)
            tl.store(there + r[None, :], whole, mask=held)
            if BACK:
                tl.store(own + r[None, :], whole.to(tl.float32) * scale[:, None], mask=held)
