"""What kernels over weights are compiled for, as far as all of them are told alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quant.kernels.layout import DeviceInt

SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def kind_of(w: DeviceInt, dtype: torch.dtype) -> tuple[int, bool, int, int]:
    """Bits of a weight; float16, else bfloat16; the scales' type; 0: every zero point is the middle, 1: zero points, 2:
    shifts."""
    return w.bits, dtype == torch.float16, SCALES[w.scale.dtype], w.kind


def definitions(names: str, values: Iterable[Any]) -> tuple[str, ...]:
    """The compiler's options that give the names these whole numbers or truth values."""
    return tuple(f"-D{name}={int(value)}" for name, value in zip(names.split(), values, strict=True))
