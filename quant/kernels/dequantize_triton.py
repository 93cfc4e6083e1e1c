"""Packed integers to plain weights in Triton: groups of any size, GPUs before Hopper."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.layout import DeviceInt

ROWS, COLUMNS = 8, 512


def fill(w: DeviceInt, out: Tensor) -> None:  # [N, K], contiguous
    """`out` becomes the weights, computed in float32 and rounded once."""
    shared = COLUMNS if w.group == w.K else math.gcd(COLUMNS, w.group)
    dequantize_kernel[(triton.cdiv(w.K, COLUMNS), triton.cdiv(w.N, ROWS))](
        w.words, w.scale, w.scale if w.zero is None else w.zero, w.scale if w.shift is None else w.shift, out,
        w.N, w.K, w.scale.shape[1], w.words.shape[1],
        BITS=w.bits, GROUP=w.group, SUB=shared, ZERO=w.zero is not None, SHIFT=w.shift is not None,
        BR=ROWS, BK=COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def dequantize_kernel(
    words, scale, zero, shift, out, N, K, G, WORDS,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of BR rows and BK columns: scale * (code - zero), or scale * code + shift, as quant/kernels/layout.py."""
    n = (tl.program_id(1) * BR + tl.arange(0, BR)).to(tl.int64)
    first = tl.program_id(0) * BK
    k = tl.arange(0, BK)
    inside = (n < N)[:, None]
    count: tl.constexpr = 32 // BITS
    j = first // count + tl.arange(0, BK // count)
    w = tl.load(words + n[:, None] * WORDS + j[None, :], mask=inside & (j < WORDS)[None, :], other=0)
    groups = tl.minimum(first + tl.arange(0, BK // SUB) * SUB, K - 1) // GROUP
    at = n[:, None] * G + groups[None, :]
    s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    w = spread(w, BR, BK // count, count)
    # A code in the low bits of 2^23 is 2^23 plus the code, which takes a subtraction instead of a slow conversion.
    codes = (w >> (k % count // 2 * BITS + k % 2 * 16)[None, :]) & ((1 << BITS) - 1)
    codes = (codes | 0x4B000000).to(tl.float32, bitcast=True)
    if SHIFT:
        h = tl.load(shift + at, mask=inside, other=0.0)
        value = (codes - 8388608.0) * spread(s, BR, BK // SUB, SUB) + spread(h, BR, BK // SUB, SUB)
    elif ZERO:
        z = 8388608.0 + tl.load(zero + at, mask=inside, other=0).to(tl.float32)
        value = (codes - spread(z, BR, BK // SUB, SUB)) * spread(s, BR, BK // SUB, SUB)
    else:
        middle: tl.constexpr = 1 << (BITS - 1)
        value = (codes - (8388608.0 + middle)) * spread(s, BR, BK // SUB, SUB)
    tl.store(
        out + n[:, None] * K + (first + k)[None, :],
        value.to(out.dtype.element_ty),
        mask=inside & (first + k < K)[None, :],
    )


@triton.jit
def spread(values, ROWS: tl.constexpr, COUNT: tl.constexpr, TIMES: tl.constexpr):
    """[ROWS, COUNT] to [ROWS, COUNT * TIMES], each value `TIMES` times in a row."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, COUNT, TIMES)), (ROWS, COUNT * TIMES))
