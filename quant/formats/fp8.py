"""Weights as 8-bit floats (e4m3) with one scale a row: compressed-tensors' float-quantized checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.tensors import Tensors, check, need

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class FP8:
    """W[n, k] = code[n, k] * scale[n]."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [N] float32, float16 or bfloat16

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scale.numel() * self.scale.element_size()

    def to(self, device: torch.device) -> FP8:
        return FP8(self.codes.to(device), self.scale.to(device))

    def rows(self, index: Tensor | slice) -> FP8:
        return FP8(self.codes.view(torch.uint8)[index].view(E4M3), self.scale[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights, computed in float32 and rounded once to `dtype`."""
        return self.codes.float().mul_(self.scale.float()[:, None]).to(dtype)

    def like(self, other: object) -> bool:
        """Whether the two can be joined by `cat`."""
        return isinstance(other, FP8) and self.shape[1] == other.shape[1] and self.scale.dtype == other.scale.dtype

    @staticmethod
    def cat(parts: Sequence[FP8]) -> FP8:
        codes = torch.cat([p.codes.view(torch.uint8) for p in parts]).view(E4M3)
        return FP8(codes, torch.cat([p.scale for p in parts]))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:  # x [R, C] -> e4m3 [R, C], float32 [R, 1]
    """Each row divided by its scale, largest magnitude / 448: for weights and, at run time, for activations."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest / torch.full_like(largest, LARGEST)  # CUDA would multiply by the inverse of a plain number
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale


def pack(packed: FP8) -> dict[str, Tensor]:
    """weight float8_e4m3fn [N, K], weight_scale [N, 1]."""
    return {"weight": packed.codes, "weight_scale": packed.scale[:, None].contiguous()}


def unpack(tensors: Tensors) -> FP8:
    """From the tensors of one layer, with a scale a row or one for all; FormatError for blocks of scales."""
    codes, scale = need(tensors, "weight", "weight_scale")
    n, k = codes.shape
    check("weight", codes, (n, k), E4M3)
    if scale.numel() not in (1, n):
        raise FormatError(
            f"fp8 weights with {list(scale.shape)} scales are not supported, only one a row or one for all."
        )
    return FP8(codes, scale.flatten().expand(n).contiguous())
