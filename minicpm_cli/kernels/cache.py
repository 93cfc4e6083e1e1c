"""One layer's part of the paged cache, as the operations see it: plain values, or 8-bit codes with their scales."""

from __future__ import annotations

from dataclasses import dataclass

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
    scales: Tensor | None = None  # [pages * page_size, C] float16
    k_scale: Tensor | None = None  # [pages, page_size, Hkv]
    v_scale: Tensor | None = None  # [pages, page_size, Hkv]


LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [..., D] -> codes [..., D], float16 [...]
    """Each head's row divided by its scale, largest magnitude / largest code; the scale is rounded to float16 first."""
    wide = rows.float()
    scale = (wide.abs().amax(-1) / LARGEST[dtype]).half()
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = (wide / scale.float().unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale.half()
