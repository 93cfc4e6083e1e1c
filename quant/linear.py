"""Makes a linear layer of stored weights: the fastest form that a device runs at a type of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quant.formats.fp8 import FP8
from quant.formats.int8 import Int8
from quant.formats.nf4 import NF4
from quant.kernels import targets
from quant.layers import fp8
from quant.layers.cpu_int4 import CPUInt4, group_for_cpu
from quant.layers.cpu_int8 import STEP, CPUInt8
from quant.layers.int8 import BitsAndBytes8
from quant.layers.nf4 import CPUNF4, BitsAndBytes4, fits_cpu_kernel
from quant.layers.plain import Dense, Gathered, Joined, Linear, Unpacking, room_for
from quant.pack import GroupInt, Packed, join

__all__ = [
    "CPUNF4",
    "BitsAndBytes4",
    "BitsAndBytes8",
    "CPUInt4",
    "CPUInt8",
    "Dense",
    "Gathered",
    "Joined",
    "Linear",
    "Unpacking",
    "make_dense",
    "make_linear",
]

HALVES = (torch.bfloat16, torch.float16)


def make_linear(
    stored: Sequence[Tensor | Packed], device: torch.device, dtype: torch.dtype, kernels: Path | None = None
) -> Linear:
    """One layer over the rows of all `stored` matrices, in the fastest form that `device` runs at `dtype`.

    Kernels compiled for it are kept in the folder `kernels`, if one is given.
    """
    packed = [s for s in stored if not isinstance(s, Tensor)]
    if not packed:
        return make_dense(_joined([s for s in stored if isinstance(s, Tensor)], device, dtype), kernels)
    if len(packed) == len(stored) and (len(packed) == 1 or all(p.like(packed[0]) for p in packed)):
        return _packed_linear(join(packed), device, dtype, kernels)
    return Joined([make_linear([s], device, dtype, kernels) for s in stored])


def make_dense(weight: Tensor, kernels: Path | None = None) -> Linear:  # [N, K]
    """A layer over plain weights where they are."""
    if weight.device.type == "cuda":
        from quant.kernels import gemv

        if gemv.supported(weight, weight.dtype) and targets.unavailable(weight.device) is None:
            from quant.layers.cuda_dense import CUDADense

            return CUDADense(weight, kernels)
    return Dense(weight)


def _joined(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copies part after part into place, so that no second copy of the whole exists."""
    weight = room_for(sum(p.shape[0] for p in parts), parts[0].shape[1], dtype, device)
    row = 0
    for part in parts:
        weight[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]
    return weight


def _packed_linear(packed: Packed, device: torch.device, dtype: torch.dtype, kernels: Path | None) -> Linear:
    if device.type == "cpu":
        return _cpu_linear(packed, dtype)
    placed = packed.to(device)
    if isinstance(placed, GroupInt):
        return _gathered(_cuda_integers(_in_stored_order(placed), dtype, kernels), placed.order)
    if isinstance(placed, NF4) and device.type == "cuda" and placed.shape[1] % placed.block == 0:
        return BitsAndBytes4(placed, dtype)
    if isinstance(placed, Int8) and device.type == "cuda":
        return BitsAndBytes8(placed, dtype)
    if isinstance(placed, FP8) and fp8.runs_on(device, placed.shape[1]):
        return fp8.ScaledFP8(placed, dtype)
    return Unpacking(placed, dtype)


def _cuda_integers(packed: GroupInt, dtype: torch.dtype, kernels: Path | None) -> Linear:
    """By kernels of our own in 16 bits, where Triton compiles those for many rows; else unpacked every time."""
    whole_words = packed.shape[1] * packed.bits % 32 == 0
    device = packed.codes.device
    if device.type == "cuda" and whole_words and dtype in HALVES and targets.triton_compiles(device):
        from quant.kernels import layout
        from quant.layers.cuda_int import CUDAInt

        return CUDAInt(layout.pack(packed), dtype, kernels, compiled=targets.unavailable(device) is None)
    return Unpacking(packed, dtype)


def _cpu_linear(packed: Packed, dtype: torch.dtype) -> Linear:
    """Packed where a product of torch or bitsandbytes takes it, else plain: unpacking every time is 20 times slower
    (4096 x 4096 NF4, one row: 25 ms against 1.8 plain; fp8: 70 ms)."""
    if dtype == torch.bfloat16:
        if isinstance(packed, GroupInt):
            layer = _cpu_integers(_in_stored_order(packed))
            if layer is not None:
                return _gathered(layer, packed.order)
        if isinstance(packed, Int8) and packed.shape[1] % STEP == 0:
            return CPUInt8(packed.codes, packed.absmax / 127)
        if isinstance(packed, NF4) and fits_cpu_kernel(packed):
            return CPUNF4(packed)
    return Dense(packed.dequantize(dtype))


def _cpu_integers(packed: GroupInt) -> Linear | None:
    whole_rows = packed.group == packed.shape[1] and packed.group % STEP == 0
    if packed.bits == 8 and whole_rows and packed.zero is None and packed.offset is None:
        return CPUInt8(packed.codes, packed.scale[:, 0])
    group = group_for_cpu(packed)
    if group is None:
        return None
    return CPUInt4(packed if group == packed.group else packed.regrouped(group))


def _in_stored_order(packed: GroupInt) -> GroupInt:
    return packed if packed.order is None else replace(packed, order=None)


def _gathered(layer: Linear, order: Tensor | None) -> Linear:
    return layer if order is None else Gathered(layer, order)
