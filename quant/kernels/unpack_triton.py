"""Triton: packed weights unpacked in registers, as tensor cores take them; and what a kernel is told of a packing."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.dequantize_triton import spread
from quant.kernels.layout import DeviceInt

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
# Columns whose scale a block reads once. With 256, one of each row, Triton 3.6 multiplied 4 bits wrongly (an H200).
WIDEST = 128

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


def supported(w: DeviceInt, dtype: torch.dtype) -> bool:
    """Whether `unpacked` takes it: the copy engine wants rows of a multiple of 16 bytes.

    The lanes know their columns by how Hopper's tensor cores take operands from registers: other GPUs are left out.
    """
    hopper = not w.words.is_cuda or _capability(w.words.device) == (9, 0)
    return hopper and dtype in KINDS and w.words.shape[1] % 4 == 0 and w.K >= 64


def target(w: DeviceInt, x: Tensor, columns: int) -> dict[str, object]:
    """The packing as kernels are told it, and the instructions that undo it; Triton's interpreter knows no PTX."""
    kind, zero = KINDS[x.dtype], w.zero is not None or w.shift is not None
    form = {"BITS": w.bits, "GROUP": w.group, "ZERO": w.zero is not None, "SHIFT": w.shift is not None}
    # So many columns in a row have a scale in common, whatever multiple of `columns` they start at.
    form["SUB"] = math.gcd(columns, WIDEST) if w.group == w.K else math.gcd(columns, w.group, WIDEST)
    if x.device.type == "cpu":
        return {**form, "ASM": "", "BIAS": 0}
    bias = 0 if (w.bits, kind) == (8, "bf16") else MAGIC_BIAS[kind]
    return {**form, "ASM": unpacking(w.bits, kind, zero), "BIAS": bias}


def dependent(x: Tensor) -> dict[str, bool]:
    """Options of a launch that begins before the one ahead of it has ended, where the device can."""
    early = x.is_cuda and _capability(x.device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
