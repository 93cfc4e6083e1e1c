"""Packed products of a batch of rows in Triton, where the kernel in rows.cu is slower or cannot be compiled.

The weights are read once and the tensor cores fed from registers; a matrix too small to fill the chip is cut along K.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quant.errors import SchemeError
from quant.kernels.layout import DeviceInt
from quant.kernels.rows_triton_kernel import MAGIC_BIAS, rows_kernel, unpacking

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
MAX_TILES = 1 << 16
# Columns whose scale a block reads once. With 256, one of each row, Triton 3.6 multiplied 4 bits wrongly (an H200, more
# than 64 rows of x: off by 6 %).
WIDEST = 128
STREAMING_MULTIPROCESSORS = 132  # of an H200; another number changes the speed only


class Tiling(NamedTuple):
    """A block computes `rows` outputs of `batch` rows of x over 1/`parts` of the columns, `columns` at a time."""

    rows: int
    batch: int
    columns: int
    parts: int
    stages: int
    warps: int
    ahead: bool = True  # whether weights are fetched while the kernel before still runs


def supported(w: DeviceInt, dtype: torch.dtype) -> bool:
    """Whether `product` computes it: the copy engine wants rows of a multiple of 16 bytes.

    The lanes know their columns by how Hopper's tensor cores take operands from registers: other GPUs are left out.
    """
    if w.words.is_cuda:
        if _capability(w.words.device) != (9, 0):
            return False
        _tickets(w.words.device)  # here, since `product` may first be called while a graph is captured
    return dtype in KINDS and w.words.shape[1] % 4 == 0 and w.K >= 64


def product(
    x: Tensor,  # [T, K] bfloat16 or float16
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
    tiling: Tiling | None = None,
) -> Tensor:  # [T, N]
    """onto + alpha * x @ W^T, weights rounded to x's type, sums in float32; the same bits at every call."""
    if not supported(w, x.dtype):
        raise SchemeError(f"a product of {x.dtype} with {w.bits} bits, {w.K} columns: float16 or bfloat16, K % 32 == 0")
    rows, out = x.shape[0], x.new_empty(x.shape[0], w.N)
    if rows == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    onto = None if onto is None else onto.contiguous()
    t = tiling or choose(rows, w)
    tiles = triton.cdiv(w.N, t.rows) * triton.cdiv(rows, t.batch)
    parts = t.parts if tiles <= MAX_TILES else 1
    partial = x.new_empty(tiles * parts * t.rows * t.batch if parts > 1 else 1, dtype=torch.float32)
    zero, shift = out if w.zero is None else w.zero, out if w.shift is None else w.shift
    word = 32 // w.bits
    rows_kernel[(tiles, parts)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [t.batch, t.columns]),
        TensorDescriptor(w.words, list(w.words.shape), list(w.words.stride()), [t.rows, t.columns // word]),
        w.words.view(torch.uint8), w.scale, zero, shift, out if onto is None else onto, out, partial,
        _tickets(x.device), alpha, rows, w.N, w.K, w.scale.shape[1], w.words.shape[1] * 4,
        **target(w, x, t.columns), BN=t.rows, BT=t.batch, BK=t.columns, SPLIT=parts > 1, STAGES=t.stages,
        ONTO=onto is not None, AHEAD=t.ahead, num_warps=t.warps, **dependent(x),
    )  # fmt: skip
    return out


def choose(rows: int, w: DeviceInt) -> Tiling:
    """The tiling by the sizes, as measured on an H200."""
    batch = min(128, max(16, triton.next_power_of_2(rows)))
    columns = 256 if w.bits == 4 else 128
    tile = 64
    tiles = triton.cdiv(w.N, tile) * triton.cdiv(rows, batch)
    parts = max(1, min(round(2 * STREAMING_MULTIPROCESSORS / tiles), triton.cdiv(w.K, columns) // 2, 8))
    return Tiling(tile, batch, columns, parts, 3, 4)


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


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Zeros, which every kernel leaves as it found them. First asked for outside of a captured graph."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
