"""fp8 weights and activations through torch's scaled product (CUDA capability 8.9 and later)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quant.formats.fp8 import E4M3, FP8, quantize

CAPABILITY = (8, 9)
STEP = 16  # the product takes multiples of 16 only


class ScaledFP8:
    """Each row of the inputs is quantized as it comes; the product accumulates in float32 and answers in bf16."""

    def __init__(self, packed: FP8, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.out_features = packed.shape[0]
        missing = -packed.shape[0] % STEP
        self.codes = functional.pad(packed.codes.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
        self.scale = functional.pad(packed.scale.float(), (0, missing))[None]  # [1, N]

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scale.numel()

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = quantize(x)
        y = torch._scaled_mm(codes, self.codes.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16)
        return y[:, : self.out_features].to(x.dtype)

    def dequantize(self) -> Tensor:
        whole = self.codes.float() * self.scale.T
        return whole[: self.out_features].to(self.dtype)


def runs_on(device: torch.device, columns: int) -> bool:
    """Whether the scaled product takes rows of `columns` on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY and columns % STEP == 0
