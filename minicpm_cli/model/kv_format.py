"""How the cache holds keys and values, and what a token costs in it; without torch, as the memory is planned before."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from minicpm_cli.model.config import ModelConfig

KVName = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
SCALE_BYTES = 2  # one float16 for each key and each value head of a token, where its elements are 8-bit codes
_ELEMENT_BYTES = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1})


@dataclass(frozen=True, slots=True)
class KVFormat:
    """fp8 is e4m3; fp8 and int8 are codes with a scale: value = code * scale."""

    name: KVName

    @classmethod
    def of(cls, kv_dtype: str, dtype: str) -> KVFormat:
        """What `--kv-dtype` asks for; "auto" is the model's own `dtype` (bf16, fp16 or fp32)."""
        name = dtype if kv_dtype == "auto" else kv_dtype
        assert name in _ELEMENT_BYTES, name
        return cls(name)  # type: ignore[arg-type]

    @property
    def quantized(self) -> bool:
        return self.element_bytes == 1

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.name]

    def beside(self, scheme: str) -> str:
        """The scheme of a model's weights, with the cache's where it is a choice of its own."""
        return f"{scheme}, {self.name} KV" if self.quantized else scheme

    def bytes_per_token(self, cfg: ModelConfig) -> int:
        """Bytes that a token adds to the cache over all layers, scales included."""
        scales = cfg.layers * heads_per_token(cfg) * SCALE_BYTES if self.quantized else 0
        return cfg.kv_elements_per_token * self.element_bytes + scales


def heads_per_token(cfg: ModelConfig) -> int:
    """C: the rows of one layer's cache that belong to a token. Keys, then values; MLA has one for both."""
    return 1 if cfg.mla else 2 * cfg.kv_heads
