"""What a step begins with, one launch each: the rows of the embedding, and the angles of the positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.launch import Remembered


@Remembered
@triton.jit
def _embed(ids, table, out, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = tl.load(ids + row) * width
    values = tl.load(table + source + columns, mask=inside).to(tl.float32) * scale
    tl.store(out + row.to(tl.int64) * width + columns, values.to(out.dtype.element_ty), mask=inside)


def embed(ids: Tensor, table: Tensor, scale: float) -> Tensor:  # [T] int64, [V, H] -> [T, H]
    """table[ids] * scale, rounded once."""
    width, block = table.shape[1], 1024
    out = torch.empty(len(ids), width, dtype=table.dtype, device=table.device)
    _embed[(len(ids), triton.cdiv(width, block))](ids, table, out, scale, width, BLOCK=block)
    return out


@Remembered
@triton.jit
def _angles(positions, frequencies, cos, sin, factor, half, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + i, mask=inside, other=0.0)
    tl.store(cos + row * half + i, tl.cos(angle) * factor, mask=inside)
    tl.store(sin + row * half + i, tl.sin(angle) * factor, mask=inside)


def angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R/2] float32 of positions [T] times frequencies [R/2], times `factor`."""
    half = len(frequencies)
    cos, sin = torch.empty(2, len(positions), 1, half, device=positions.device).unbind()
    _angles[(len(positions),)](positions, frequencies, cos, sin, factor, half, BLOCK=triton.next_power_of_2(half))
    return cos, sin
