"""8-bit weights with one scale a row on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# From this many rows on, unpacking to bf16 and one dense product is faster than torch's 8-bit product
# (Zen 5, 1 thread, N x K = 3072 x 576: 16 rows 0.61 against 0.38 ms, 32 rows 0.73 against 0.75, 128 rows 1.4 and 3.0).
DENSE_ROWS = 32
# Rows that are no multiple of this crash torch's 8-bit product (2.13 reads past their ends).
STEP = 32
# So do codes that begin at any other address, as they may in a mapped file.
ALIGNMENT = 64


class CPUInt8:
    """Through torch's weight-only 8-bit product with bf16 activations, which stay as they are: no outliers to treat."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:  # [N, K] int8, [N]
        self.codes = codes if codes.data_ptr() % ALIGNMENT == 0 else codes.clone()
        self.scale = scale.bfloat16()
        self.out_features = codes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 2 * self.scale.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= DENSE_ROWS:
            return functional.linear(x, self.dequantize())
        return torch._weight_int8pack_mm(x, self.codes, self.scale)

    def dequantize(self) -> Tensor:  # [N, K] bf16
        return self.codes.bfloat16().mul_(self.scale[:, None])
