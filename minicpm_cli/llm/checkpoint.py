"""What a checkpoint says of itself before a weight is read: config, sampling values, how its weights are stored."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.hub.files import read_json
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import GGUFHeader, config_from_gguf, read_header

_PACKED = frozenset({"Q4_0", "Q4_1", "Q8_0"})  # stay packed in memory; other kinds are unpacked when they are loaded


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`scheme` is the packing of a GGUF file's weights, None where they take the dtype they are loaded with."""

    path: Path
    cfg: ModelConfig
    scheme: str | None = None
    _header: GGUFHeader | None = None

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Raises ConfigError, WeightsError or UnsupportedModel."""
        if path.is_dir():
            return cls(path, ModelConfig.from_hf(read_json(path / "config.json"), _generation(path)))
        header = read_header(path)
        return cls(path, ModelConfig.from_hf(config_from_gguf(header)), _scheme(header), header)

    def weight_bytes(self, itemsize: int) -> int:
        """About what the weights will take in memory, where plain ones have `itemsize` bytes an element."""
        if self._header is None:
            return self.cfg.parameters * itemsize
        return sum(
            tensor.nbytes if tensor.type in _PACKED else math.prod(tensor.shape) * itemsize
            for tensor in self._header.tensors.values()
        )


def _generation(path: Path) -> dict[str, Any] | None:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else None


def _scheme(header: GGUFHeader) -> str | None:
    """The kind that holds most bytes, if the file is quantized at all."""
    stored: Counter[str] = Counter()
    for tensor in header.tensors.values():
        stored[tensor.type] += tensor.nbytes
    kind = stored.most_common(1)[0][0] if stored else "F32"
    return None if kind in ("F32", "F16", "BF16") else kind
