"""One layer's part of the paged cache, as the operations see it: plain values, or 8-bit codes with their scales."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's buffers. A token's row holds its C heads: the keys, then the values.

    For MLA the value is a prefix of the key, so that a token is stored once (C = 1). With `scales`, a value is
    code * scale, one scale for each token and head.
    """

    rows: Tensor  # [pages * page_size, C, D] bf16, fp16, fp32, float8_e4m3fn or int8: a token's row, what a step writes
    k: Tensor  # [pages, page_size, Hkv, Dk]
    v: Tensor  # [pages, page_size, Hkv, Dv]
    scales: Tensor | None = None  # [pages, page_size, C] float16, where a head's scales of a page lie side by side
    k_scale: Tensor | None = None  # [pages, page_size, Hkv]
    v_scale: Tensor | None = None  # [pages, page_size, Hkv]


def beside(scales: Tensor, page_size: int) -> Tensor:  # [pages * page_size, C] -> [pages, page_size, C]
    """As a cache holds them: one by one they would take a sector of 32 bytes each, a third of all that is read."""
    return scales.unflatten(0, (-1, page_size)).transpose(1, 2).contiguous().transpose(1, 2)


LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
# What fp8 may make of a row's largest magnitude: its seven largest codes, of which each row takes the best. With the
# first for all, the demo model in bf16 is 8.4e-3 nats a token (KL) from the one with a bf16 cache; so it is 5.6e-3, and
# with int8 2.7e-3.
FP8_PEAKS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0)


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [..., D] -> codes [..., D], float16 [...]
    """Each head's row divided by its scale, which is rounded to float16 first: its largest magnitude / a code."""
    wide = rows.float()
    peak = wide.abs().amax(-1)
    codes, scale, least = _coded(wide, peak / LARGEST[dtype], dtype)
    if dtype == torch.int8:
        return codes, scale
    for code in FP8_PEAKS[1:]:
        others, other, error = _coded(wide, peak / code, dtype)
        better = error < least
        codes = torch.where(better.unsqueeze(-1), others.view(torch.uint8), codes.view(torch.uint8)).view(dtype)
        scale, least = torch.where(better, other, scale), torch.minimum(error, least)
    return codes, scale


def _coded(wide: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and the sum of squared errors."""
    scale = exact.half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    by = scale.float().unsqueeze(-1)
    scaled = (wide / by).clamp_(-LARGEST[dtype], LARGEST[dtype])
    codes = (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)
    return codes, scale, (codes.float() * by - wide).square_().sum(-1)
