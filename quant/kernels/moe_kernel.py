"""Triton: the products of a mixture of experts, every expert's tokens with its own matrix, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quant.kernels.unpack_triton import unpacked


@triton.jit
def _matrix(
    weights, scale, zero, shift, row, rows, k, K, G, DTYPE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ZERO: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[BN, BK] weights from `row` and `k` on, plain where BITS is 16."""
    if BITS == 16:
        w = weights.load([row, k])
    else:
        n = tl.minimum(row + tl.arange(0, BN), rows - 1)
        w = weights.load([row, k // (32 // BITS)])
        w = unpacked(w, scale, zero, shift, n, k, K - 1, G, BITS, GROUP, SUB, BN, BK, ZERO, SHIFT, BIAS, ASM, DTYPE)
    return w


@triton.jit
def _expert(starts, block, E: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr):
    """The expert whose tokens the block takes (E: none left), its first row in their order, and where they end."""
    e = tl.arange(0, EP)
    begins = tl.load(starts + e, mask=e < E, other=0)
    ends = tl.load(starts + e + 1, mask=e < E, other=0)
    blocks = (ends - begins + BT - 1) // BT
    through = tl.cumsum(blocks, 0)
    expert = tl.sum((through <= block).to(tl.int32), 0)
    mine = (e == expert) & (e < E)
    first = tl.sum(tl.where(mine, begins + (block - through + blocks) * BT, 0), 0)
    expert = tl.where(tl.sum(mine.to(tl.int32), 0) > 0, expert, E)
    return expert, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit(do_not_specialize=["R"])
def experts_kernel(
    x, order, starts, weights, scale, zero, shift, out, threshold, R, N, K, G, STRIDE, ROWS,
    E: tl.constexpr, EP: tl.constexpr, ACTIVE: tl.constexpr, GATE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr,
    BIAS: tl.constexpr, ASM: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [parts, R, N] in the experts' order; with a gate, of rows n and N + n of each expert's 2N.

    x [*, K], STRIDE apart: row order[i] / ACTIVE of it goes with row i of out, or row i where ACTIVE is 0. weights: a
    tensor descriptor of all experts' rows, ROWS in all, one expert after the other. Grid: blocks of tokens (as many as
    there may be), tiles of N, parts of K.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, end = _expert(starts, tl.program_id(0), E, EP, BT)
    if expert < E:
        i = first + tl.arange(0, BT)
        source = i
        if ACTIVE > 0:
            source = tl.load(order + i, mask=i < end, other=0) // ACTIVE
        lines = x + source.to(tl.int64)[:, None] * STRIDE
        first_n = tl.program_id(1) * BN
        row = expert * (N if GATE == "" else 2 * N) + first_n
        chunks = tl.cdiv(K, BK)
        part, parts = tl.program_id(2), tl.num_programs(2)
        acc = tl.zeros((BN, BT), tl.float32)
        up = tl.zeros((BN, BT), tl.float32)
        for chunk in tl.range(part * chunks // parts, (part + 1) * chunks // parts, num_stages=STAGES):
            k = chunk * BK + tl.arange(0, BK)
            columns = tl.load(lines + k[None, :], mask=(i < end)[:, None] & (k < K)[None, :], other=0.0)
            if ASM == "":  # the interpreter's dot takes bfloat16 for integers
                columns = columns.to(tl.float32)
            columns = tl.trans(columns)
            w = _matrix(
                weights, scale, zero, shift, row, ROWS, chunk * BK, K, G, x.dtype.element_ty,
                BITS, GROUP, SUB, BN, BK, ZERO, SHIFT, BIAS, ASM,
            )  # fmt: skip
            acc = tl.dot(w.to(columns.dtype), columns, acc)
            if GATE != "":
                w = _matrix(
                    weights, scale, zero, shift, row + N, ROWS, chunk * BK, K, G, x.dtype.element_ty,
                    BITS, GROUP, SUB, BN, BK, ZERO, SHIFT, BIAS, ASM,
                )  # fmt: skip
                up = tl.dot(w.to(columns.dtype), columns, up)
        if GATE == "silu":
            acc = acc / (1 + tl.exp(-acc)) * up
        elif GATE == "relu":
            acc = tl.where(acc >= threshold, acc, 0.0) * up
        n = first_n + tl.arange(0, BN)
        at = (part.to(tl.int64) * R + i)[None, :] * N + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(i < end)[None, :] & (n < N)[:, None])
