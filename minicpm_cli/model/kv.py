"""The paged cache: one buffer a layer, in which a page holds the keys and values of `page_size` tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCache:
    layers: tuple[LayerCache, ...]
    pages: int
    page_size: int
    nbytes: int

    @classmethod
    def allocate(
        cls, cfg: ModelConfig, pages: int, page_size: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """Zeroed pages, so that a padded row may be read: its value is multiplied by 0, which NaN would survive."""
        heads, dim = (1, cfg.mla.latent) if cfg.mla else (2 * cfg.kv_heads, cfg.head_dim)
        shape = (cfg.layers, pages, page_size, heads, dim)
        whole = torch.zeros(shape, device=device, dtype=dtype)
        layers = tuple(_views(buffer, cfg) for buffer in whole)
        return cls(layers, pages, page_size, whole.numel() * whole.element_size())


def _views(buffer: Tensor, cfg: ModelConfig) -> LayerCache:
    rows = buffer.flatten(0, 1)
    if cfg.mla:
        return LayerCache(rows, buffer, buffer[..., : cfg.mla.kv_rank])
    return LayerCache(rows, buffer[:, :, : cfg.kv_heads], buffer[:, :, cfg.kv_heads :])
