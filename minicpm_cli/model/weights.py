"""How layers get their weights: by Hugging Face name, each exactly once, placed on the device as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme
from minicpm_cli.model.lora_layer import LowRankBeside
from minicpm_cli.model.lora_source import Factors
from minicpm_cli.model.quantizing_source import rounded
from minicpm_cli.model.shapes import HEAD
from minicpm_cli.model.source import TensorSource
from quant.embedding import Embedding
from quant.layers.plain import capturable
from quant.linear import Linear, make_dense, make_linear
from quant.pack import Packed


@dataclass(slots=True)
class Weights:
    """Pulls tensors out of `source` to `device`; counts the bytes that stay there."""

    source: TensorSource
    device: torch.device
    dtype: torch.dtype
    scheme: LoadScheme = AS_STORED
    kernels: Path | None = None  # where compiled GPU kernels are kept
    beside: Mapping[str, Factors] = field(default_factory=dict)  # of packed matrices, once they were taken
    nbytes: int = field(default=0)
    capturable: bool = field(default=True)  # whether a CUDA graph can hold every layer

    def linear(self, *wanted: tuple[str, int, int]) -> Linear:
        """One layer over the rows of the named [N, K] matrices, given as (name, N, K), in that order."""
        stored = [self.source.take(n, (rows, k)) for n, rows, k in wanted]
        layer = make_linear(stored, self.device, self.dtype, self.kernels)
        row, parts = 0, []
        for name, rows, _ in wanted:
            if name in self.beside:
                parts.append((row, self.beside[name]))
            row += rows
        if parts:
            layer = LowRankBeside(layer, parts, self.device, self.dtype)
        self._count(layer)
        return layer

    def head(self, stored: Tensor | Packed, *, shared: bool) -> Linear:
        """The output head from its own weights, or from an embedding's table, whose memory it then shares.

        Where the scheme packs the head, it becomes a matrix of its own; one that came packed stays as it is.
        """
        scheme = self.scheme.matrix(HEAD, stored.shape[1])
        if scheme and isinstance(stored, Tensor):
            stored = rounded(HEAD, stored.to(self.device), scheme)
        if shared and isinstance(stored, Tensor):
            return make_dense(stored, self.kernels)
        layer = make_linear([stored], self.device, self.dtype, self.kernels)
        self._count(layer)
        return layer

    def _count(self, layer: Linear) -> None:
        self.nbytes += layer.nbytes
        self.capturable &= capturable(layer)

    def vector(self, name: str, size: int) -> Tensor:  # [size]
        return self._placed(self.source.take(name, (size,)))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:  # [rows, columns]
        """Plain weights, unpacked if they are stored packed."""
        return self._placed(self.source.take(name, (rows, columns)))

    def embedding(self, table: Tensor | Packed) -> Embedding:
        layer = Embedding(table, self.device, self.dtype)
        self.nbytes += layer.nbytes
        return layer

    def _placed(self, stored: Tensor | Packed) -> Tensor:
        plain = stored if isinstance(stored, Tensor) else stored.dequantize()
        placed = plain.to(self.device, self.dtype, copy=True)
        self.nbytes += placed.numel() * placed.element_size()
        return placed
