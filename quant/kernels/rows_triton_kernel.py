"""Triton: integers times 2 to about 128 rows of activations, unpacked in registers, multiplied on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quant.kernels.dequantize_triton import spread

# The weights are the left operand of the tensor cores, which they enter from registers; there, lane l of a warp holds
# the neighbours 2 * (l % 4) and the next of every eight columns. Each lane therefore loads the whole word and shifts
# by its own amount to its pair, so that the columns stay in order and the activations need no permutation.
_LANE = "mov.u32 l, %laneid; and.b32 l, l, {lanes}; shl.b32 l, l, {log}; "
# A code within the mantissa of a power of two is that power plus the code: 128 in bfloat16, 1024 in float16.
_MAGIC = {"bf16": "0x43004300", "f16": "0x64006400"}
MAGIC_BIAS = {"bf16": 128, "f16": 1024}


def unpacking(bits: int, kind: str, zero: bool) -> str:  # kind: bf16 | f16
    """PTX from a word ($1), a pair of scales ($3), zeros ($4) and shifts ($5) to a pair of weights ($0).

    Zeros come with the magic number's bias, but for 8 bits in bfloat16, whose mantissa has 7 bits: there the eighth is
    added apart, and a zero of 128 is built in.
    """
    lane = _LANE.format(lanes=3 if bits == 4 else 1, log=2 if bits == 4 else 3)
    end = f"fma.rn.{kind}x2 $0, t, $3, $5;"
    if bits == 8 and kind == "bf16":
        # 0x4000 is 2.0: the eighth bit, moved there, counts 128 by a factor of 64 (0x4280).
        low = "0xC380C380" if not zero else "0xC300C300"  # -256 or -128
        less = f"sub.rn.bf16x2 t, t, $4; {end}" if zero else end
        return (
            "{ .reg .b32 t, l, h, c; " + lane + "shr.u32 t, $1, l; shl.b32 h, t, 7; "
            "lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea; and.b32 h, h, 0x40004000; "
            f"mov.b32 c, {low}; add.rn.bf16x2 t, t, c; mov.b32 c, 0x42804280; fma.rn.bf16x2 t, h, c, t; {less} }}"
        )
    mask = "0x000f000f" if bits == 4 else "0x00ff00ff"
    sub = "sub.rn.bf16x2" if kind == "bf16" else "sub.rn.f16x2"
    return (
        "{ .reg .b32 t, l; " + lane + f"shr.u32 t, $1, l; lop3.b32 t, t, {mask}, {_MAGIC[kind]}, 0xea; "
        f"{sub} t, t, $4; {end} }}"
    )


@triton.jit
def _group_values(values, n, first, last, SUB: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, G):
    """[BN, BK / SUB] of a [N, G] tensor: its values for columns `first` on, `SUB` columns apart."""
    k = tl.minimum(first + tl.arange(0, BK // SUB) * SUB, last)
    return tl.load(values + n[:, None] * G + (k // GROUP)[None, :])


@triton.jit
def unpacked(
    w, scale, zero, shift, n, first, last, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ZERO: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[BN, BK] weights out of [BN, BK * BITS / 32] words."""
    s = _group_values(scale, n, first, last, SUB, BK, GROUP, G).to(tl.float32)
    middle: tl.constexpr = 8 if BITS == 4 else 128
    z = tl.full((BN, BK // SUB), middle, tl.float32)
    h = tl.full((BN, BK // SUB), 0.0, tl.float32)
    if ZERO:
        z = _group_values(zero, n, first, last, SUB, BK, GROUP, G).to(tl.float32)
    if SHIFT:
        # As a whole zero and what is left of the shift, which is small enough for the activations' type.
        h = _group_values(shift, n, first, last, SUB, BK, GROUP, G)
        z = tl.minimum(tl.maximum(tl.floor(0.5 - h / tl.where(s == 0, 1.0, s)), 0.0), 2 * middle - 1.0)
        h += z * s
    w = spread(w, BN, BK * BITS // 32, 32 // BITS)
    if ASM == "":
        k = tl.arange(0, BK)[None, :]
        codes = (w >> (k % (32 // BITS) // 2 * BITS + k % 2 * 16)) & (2 * middle - 1)
        codes = codes.to(tl.float32) - spread(z, BN, BK // SUB, SUB)
        s = s.to(DTYPE).to(tl.float32)
        a = (codes * spread(s, BN, BK // SUB, SUB) + spread(h, BN, BK // SUB, SUB)).to(DTYPE)
    else:
        s = spread(s.to(DTYPE), BN, BK // SUB, SUB)
        z = spread((z + BIAS).to(DTYPE), BN, BK // SUB, SUB)
        h = spread(h.to(DTYPE), BN, BK // SUB, SUB)
        if tl.bfloat16 == DTYPE:
            a = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r", [w, s, z, h], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            a = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r", [w, s, z, h], dtype=tl.float16, is_pure=True, pack=2)
    return a


@triton.jit
def _reduce(acc, partial, tickets, tile, BN: tl.constexpr, BT: tl.constexpr):
    """Leaves this part's sum in `partial`; whoever comes last adds all of them, always in the same order.

    Returns the sum and whether this is the last part. The ticket is back at 0 when the kernel ends.
    """
    part, parts = tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(partial + (tile * parts + part) * (BN * BT) + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == parts - 1
    if last:
        acc = tl.zeros((BN, BT), tl.float32)
        for other in range(parts):
            acc += tl.load(partial + (tile * parts + other) * (BN * BT) + at, cache_modifier=".cg")
        tl.store(tickets + tile, 0)
    return acc, last


@triton.jit
def _fetch_ahead(lines, n, start, end, ROW, BN: tl.constexpr):
    """Bytes start..end of rows n into the L2 cache: weights depend on nothing, nor on the kernel that still runs."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [lines + n.to(tl.int64) * ROW + start, tl.zeros((BN,), tl.int32) + (end - start)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    x, words, lines, scale, zero, shift, onto, out, partial, tickets, alpha, T, N, K, G, ROW,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, DEPENDENT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out [T, N] = onto + alpha * x [T, K] @ W [N, K]^T for a tile of BN x BT, or for a part of its columns.

    x, words: tensor descriptors, blocks [BT, BK] and [BN, BK * BITS / 32]; lines: the words as a pointer to bytes,
    ROW of them a row; tickets: zeros, at least as many as there are tiles.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    chunks = tl.cdiv(K, BK)
    begin, end = part * chunks // tl.num_programs(1), (part + 1) * chunks // tl.num_programs(1)
    tiles_n = tl.cdiv(N, BN)
    first_n, first_t = tile % tiles_n * BN, tile // tiles_n * BT
    n = tl.minimum(first_n + tl.arange(0, BN), N - 1)
    if DEPENDENT:
        gdc_launch_dependents()
        if AHEAD:
            _fetch_ahead(lines, n, begin * (BK * BITS // 8), tl.minimum(end * (BK * BITS // 8), ROW), ROW, BN)
        gdc_wait()
    acc = tl.zeros((BN, BT), tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        w = words.load([first_n, chunk * (BK * BITS // 32)])
        a = unpacked(
            w, scale, zero, shift, n, chunk * BK, K - 1, G, BITS, GROUP, SUB, BN, BK, ZERO, SHIFT, BIAS, ASM, x.dtype
        )
        columns = tl.trans(x.load([first_t, chunk * BK]))
        if ASM == "":  # the interpreter's dot takes bfloat16 for integers
            a, columns = a.to(tl.float32), columns.to(tl.float32)
        acc = tl.dot(a, columns, acc)
    last = True  # of the parts of this tile
    if SPLIT:
        acc, last = _reduce(acc, partial, tickets, tile, BN, BT)
    if last:
        t = first_t + tl.arange(0, BT)
        n = first_n + tl.arange(0, BN)
        inside = (t < T)[None, :] & (n < N)[:, None]
        at = t.to(tl.int64)[None, :] * N + n[:, None]
        acc *= alpha
        if ONTO:
            acc += tl.load(onto + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(x.dtype), mask=inside)
