"""bitsandbytes' 8-bit weights (LLM.int8, Dettmers et al. 2022): one scale a row, outlying inputs apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.tensors import Tensors, check, need

STEP = 0.007874015718698502  # 1/127 as bitsandbytes multiplies it
ROW_FORMAT = 0  # `weight_format` of plain row-major codes, the only one that is still written


@dataclass(frozen=True, slots=True)
class Int8:
    """W[n, k] = code[n, k] * absmax[n] / 127."""

    codes: Tensor  # [N, K] int8
    absmax: Tensor  # [N] float32

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.absmax.numel()

    def to(self, device: torch.device) -> Int8:
        return Int8(self.codes.to(device), self.absmax.to(device))

    def rows(self, index: Tensor | slice) -> Int8:
        return Int8(self.codes[index], self.absmax[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights, computed in float32 and rounded once to `dtype`."""
        return (self.codes * self.absmax[:, None] * STEP).to(dtype)

    def like(self, other: object) -> bool:
        """Whether the two can be joined by `cat`."""
        return isinstance(other, Int8) and self.shape[1] == other.shape[1]

    @staticmethod
    def cat(parts: Sequence[Int8]) -> Int8:
        return Int8(torch.cat([p.codes for p in parts]), torch.cat([p.absmax for p in parts]))


def quantize(w: Tensor) -> Int8:  # [N, K]
    """As bitsandbytes rounds: through float16, times 127 over the largest magnitude of the row."""
    half = w.half()
    absmax = half.abs().amax(-1).float()
    codes = (half * (127.0 / torch.where(absmax == 0, 1.0, absmax))[:, None]).round_()
    return Int8(codes.to(torch.int8), absmax)


def pack(packed: Int8) -> dict[str, Tensor]:
    """weight int8 [N, K], SCB float32 [N], weight_format."""
    weight_format = torch.tensor(ROW_FORMAT, dtype=torch.uint8)
    return {"weight": packed.codes, "SCB": packed.absmax, "weight_format": weight_format}


def unpack(tensors: Tensors) -> Int8:
    """From the tensors of one layer; FormatError where they do not fit together."""
    codes, absmax = need(tensors, "weight", "SCB")
    n, k = codes.shape
    check("weight", codes, (n, k), torch.int8)
    check("SCB", absmax, (n,))
    layout = tensors.get("weight_format")
    if layout is not None and int(layout) != ROW_FORMAT:
        raise FormatError(f"8-bit weights in layout {int(layout)} are for one GPU only; save them again in row format.")
    return Int8(codes, absmax.float())
