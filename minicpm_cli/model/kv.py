"""The paged cache: one buffer a layer, in which a page holds the keys and values of `page_size` tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.kv_format import KVFormat, heads_per_token

_CODES = MappingProxyType({"fp8": torch.float8_e4m3fn, "int8": torch.int8})


@dataclass(frozen=True, slots=True)
class KVCache:
    layers: tuple[LayerCache, ...]
    pages: int
    page_size: int
    nbytes: int

    @classmethod
    def allocate(
        cls,
        cfg: ModelConfig,
        pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_format: KVFormat | None = None,
    ) -> KVCache:
        """In the model's `dtype`, or as 8-bit codes where `kv_format` says so.

        Zeroed, so that a padded row may be read: its value is multiplied by 0, which NaN would survive.
        """
        codes = kv_format is not None and kv_format.quantized
        held = _CODES[kv_format.name] if kv_format and codes else dtype
        heads, dim = heads_per_token(cfg), cfg.mla.latent if cfg.mla else cfg.head_dim
        shape = (cfg.layers, pages, page_size, heads, dim)
        whole = torch.zeros(*shape[:-1], dim * held.itemsize, device=device, dtype=torch.uint8).view(held)
        sides = (cfg.layers, pages, heads, page_size)  # a head's scales of a page side by side
        scales = torch.zeros(sides, device=device, dtype=torch.float16).transpose(2, 3) if codes else None
        layers = tuple(_views(whole[i], scales[i] if scales is not None else None, cfg) for i in range(cfg.layers))
        return cls(layers, pages, page_size, whole.nbytes + (scales.nbytes if scales is not None else 0))


def _views(buffer: Tensor, scales: Tensor | None, cfg: ModelConfig) -> LayerCache:
    k, v = _keys_and_values(buffer, cfg)
    if scales is None:
        return LayerCache(buffer.flatten(0, 1), k, v)
    return LayerCache(buffer.flatten(0, 1), k, v, scales, *_keys_and_values(scales, cfg))


def _keys_and_values(buffer: Tensor, cfg: ModelConfig) -> tuple[Tensor, Tensor]:  # [pages, page_size, C, ...]
    """MLA's value is a prefix of the key, and shares its scale."""
    if cfg.mla:
        return buffer, buffer[..., : cfg.mla.kv_rank] if buffer.dim() == 4 else buffer
    return buffer[:, :, : cfg.kv_heads], buffer[:, :, cfg.kv_heads :]
