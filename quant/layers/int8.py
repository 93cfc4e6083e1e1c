"""LLM.int8 on CUDA through bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant.formats.int8 import Int8
from quant.layers.bnb import bitsandbytes

OUTLIER = 6.0  # inputs of at least this size are multiplied apart, in 16 bits (LLM.int8, section 3.2)


class BitsAndBytes8:
    """8-bit inputs with one scale a row; the columns that hold an outlier are multiplied in 16 bits.

    bitsandbytes looks for outliers on the host, so such a layer cannot be part of a CUDA graph.
    """

    capturable = False

    def __init__(self, packed: Int8, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.out_features = packed.shape[0]
        package = bitsandbytes()
        self.product = package.matmul
        self.state: Any = package.MatmulLtState()
        self.state.CB, self.state.SCB = packed.codes, packed.absmax
        self.state.has_fp16_weights, self.state.is_training = False, False

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x, self.packed.codes, state=self.state, threshold=OUTLIER)
        return y

    def dequantize(self) -> Tensor:
        return self.packed.dequantize(self.dtype)
