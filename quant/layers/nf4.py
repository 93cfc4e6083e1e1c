"""bitsandbytes' 4-bit weights: its kernels on CUDA, and on CPUs that multiply bf16 with AVX-512."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quant.formats.nf4 import BLOCK, NF4, Nested, quantize
from quant.formats.nf4_tables import table_of
from quant.layers.bnb import bitsandbytes

# From this many rows on, unpacking to bf16 and one dense product is no slower (Zen 5, 1 thread, N x K = 3072 x 576:
# 1 row 0.83 against 0.11 ms, 64 rows 1.5 against 0.8, 256 rows 2.9 each; plain weights 0.20, 0.67 and 2.1).
DENSE_ROWS = 256
ROWS = 32  # the CPU kernel takes blocks of 32 rows


class BitsAndBytes4:
    """Through bitsandbytes' CUDA kernels."""

    def __init__(self, packed: NF4, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.out_features = packed.shape[0]
        self.state = _state(packed, dtype)
        self.product = bitsandbytes().matmul_4bit

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x, self.packed.codes.t(), quant_state=self.state)
        return y

    def dequantize(self) -> Tensor:
        return self.packed.dequantize(self.dtype)


def _state(packed: NF4, dtype: torch.dtype) -> Any:
    """bitsandbytes' own description of the weights."""
    state = bitsandbytes().functional.QuantState
    table = table_of(packed.kind).to(packed.codes.device)
    fields: dict[str, Any] = {
        "shape": torch.Size(packed.shape),
        "code": table,
        "blocksize": packed.block,
        "quant_type": packed.kind,
        "dtype": dtype,
    }
    if not isinstance(packed.absmax, Nested):
        return state(absmax=packed.absmax, **fields)
    nested = packed.absmax
    outer = state(absmax=nested.absmax, code=nested.table, blocksize=nested.block, dtype=torch.float32)
    offset = torch.tensor(nested.offset, device=table.device)
    return state(absmax=nested.codes, offset=offset, state2=outer, **fields)


class CPUNF4:
    """Through bitsandbytes' CPU kernel, which has bf16 scales; the file's layout stays beside for many rows."""

    def __init__(self, packed: NF4) -> None:
        self.packed = packed
        self.out_features = packed.shape[0]
        self.tiles, self.scales = _tiles(packed), _scales(packed)
        self.table = table_of(packed.kind)
        self.product = torch.ops.bitsandbytes.gemv_4bit.default

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.tiles.numel() + 2 * self.scales.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= DENSE_ROWS:
            return functional.linear(x, self.dequantize())
        y: Tensor = self.product(x, self.tiles, self.packed.shape, self.scales, self.table, self.packed.block)
        return y

    def dequantize(self) -> Tensor:  # [N, K] bf16
        return self.packed.dequantize(torch.bfloat16)


def _tiles(packed: NF4) -> Tensor:  # [N, K/2] uint8
    """For each 32 rows and pair of columns 32 bytes: rows 0..15 in the low half, 16..31 in the high one."""
    n, k = packed.shape
    codes = torch.stack((packed.codes >> 4, packed.codes & 15), -1).view(n // ROWS, 2, ROWS // 2, k // 2, 2)
    low, high = codes.unbind(1)
    return (low | (high << 4)).transpose(1, 2).contiguous().view(n, k // 2)


def _scales(packed: NF4) -> Tensor:  # [K/block, N] bf16
    return packed.scales.view(packed.shape[0], -1).T.bfloat16().contiguous()


def fits_cpu_kernel(packed: NF4) -> bool:
    """Whether bitsandbytes' CPU kernel takes these weights here, tried on a small matrix."""
    n, k = packed.shape
    return n % ROWS == 0 and k % packed.block == 0 and packed.block == BLOCK and _cpu_kernel_works()


def _cpu_kernel_works() -> bool:
    try:
        package = bitsandbytes()
    except ImportError:
        return False
    if not getattr(package.functional, "has_avx512bf16", bool)():
        return False
    w = torch.arange(ROWS * BLOCK).sin().view(ROWS, BLOCK)
    layer = CPUNF4(quantize(w))
    return torch.allclose(layer(torch.eye(BLOCK, dtype=torch.bfloat16)).T, layer.dequantize(), rtol=0.02, atol=0.01)
