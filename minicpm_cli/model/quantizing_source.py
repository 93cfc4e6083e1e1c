"""Quantizes the matrices of another source as they are taken, so that one plain matrix at a time is in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.shapes import HEAD
from minicpm_cli.model.source import Stored, TensorSource
from quant.errors import QuantError
from quant.pack import Packed
from quant.rtn import rtn
from quant.scheme import Scheme


class QuantizingSource:
    """A TensorSource whose linear weights come packed by `scheme`; `device` does the rounding."""

    def __init__(self, inner: TensorSource, scheme: LoadScheme, device: torch.device) -> None:
        self._inner, self._scheme, self._device = inner, scheme, device

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def names(self) -> set[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self._inner.take(name, shape)
        scheme = self._scheme.matrix(name, shape[-1]) if name != HEAD else None  # the head may be the embedding's
        if scheme is None:
            return stored
        if not isinstance(stored, Tensor):
            raise WeightsError(f"{name} is packed already and cannot be quantized again to {scheme.name}")
        return rounded(name, stored.to(self._device), scheme)

    def ignore(self, name: str) -> None:
        self._inner.ignore(name)

    def finish(self) -> None:
        self._inner.finish()


def rounded(name: str, weight: Tensor, scheme: Scheme) -> Packed:  # weight [N, K]
    """Round-to-nearest. Raises WeightsError naming the tensor."""
    try:
        return rtn(weight, scheme)
    except QuantError as error:
        raise WeightsError(f"{name} cannot be quantized to {scheme.name}: {error}") from error
