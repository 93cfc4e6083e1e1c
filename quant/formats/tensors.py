"""Checks that the tensors of a quantized layer are there and fit together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quant.errors import FormatError

Tensors = Mapping[str, Tensor]


def need(tensors: Tensors, *names: str) -> list[Tensor]:
    """The named tensors; FormatError tells which are missing."""
    missing = [n for n in names if n not in tensors]
    if missing:
        raise FormatError(f"Quantized weights lack {', '.join(missing)}; there are {', '.join(sorted(tensors))}.")
    return [tensors[n] for n in names]


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """FormatError unless `tensor` has the shape and type that the others imply."""
    if tuple(tensor.shape) != shape or dtype not in (None, tensor.dtype):
        wanted = f"{list(shape)}" + (f" {dtype}" if dtype else "")
        raise FormatError(f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {wanted}; the files do not match.")


def check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise FormatError(f"{bits}-bit weights are not supported, only 4 and 8 bits; use another variant of the model.")
