"""A packed checkpoint under the names of the plain one: `x.weight` is put together from what its quantizer stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.packed_layers import Layout, Part, layout_of
from minicpm_cli.model.quant_config import QuantConfig
from quant.errors import QuantError
from quant.pack import Packed


class FileSource(Protocol):
    """A TensorSource that also gives tensors as they are stored."""

    def __contains__(self, name: str) -> bool: ...
    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def ignore(self, name: str) -> None: ...
    def finish(self) -> None: ...

    def raw(self, name: str) -> Tensor:
        """The tensor of any type and shape, accounted for."""

    def file(self, name: str) -> Path:
        """The file that holds the tensor, or would."""


class QuantizedSource:
    """A TensorSource; layers that the files hold plain come plain.

    Raises WeightsError naming file and tensor for what is missing, does not fit or would change the result.
    """

    def __init__(self, inner: FileSource, config: QuantConfig) -> None:
        self._inner, self._config = inner, config
        self._layout: Layout = layout_of(config)
        mark = self._layout.mark
        self._modules = {n.removesuffix(mark) for n in inner.names() if n.endswith(mark)}
        if "weight" not in self._layout.endings:
            self._refuse_doubles()

    def _refuse_doubles(self) -> None:
        for module in sorted(self._modules):
            if (name := f"{module}.weight") in self._inner:
                raise WeightsError(
                    f"{self._inner.file(name)}: tensor {name} is there both plain and packed; remove one of the two"
                )

    def __contains__(self, name: str) -> bool:
        return _module(name) in self._modules or name in self._inner

    def names(self) -> set[str]:
        stored = {f"{m}.{ending}" for m in self._modules for ending in (*self._layout.endings, "bias")}
        return (self._inner.names() - stored) | {f"{m}.weight" for m in self._modules}

    def shape(self, name: str) -> tuple[int, ...]:
        module = _module(name)
        if module not in self._modules:
            return self._inner.shape(name)
        scheme = self._config.of(module).scheme
        return self._layout.shape(lambda ending: self._inner.raw(f"{module}.{ending}"), scheme)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | Packed:
        module = _module(name)
        if module not in self._modules:
            return self._inner.take(name, shape)
        n, k = shape
        config = self._config.of(module)
        layer = _Layer(self._inner, config, module, (n, k))
        layer.check_bias()
        tensors = {part.ending: layer.part(part) for part in self._layout.parts(n, k, config.scheme)}
        return layer.unpacked(self._layout, {ending: t for ending, t in tensors.items() if t is not None})

    def ignore(self, name: str) -> None:
        self._inner.ignore(name)

    def finish(self) -> None:
        self._inner.finish()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of one packed matrix."""

    source: FileSource
    config: QuantConfig
    module: str
    shape: tuple[int, int]

    def part(self, part: Part) -> Tensor | None:
        name = f"{self.module}.{part.ending}"
        if name not in self.source:
            if part.optional:
                return None
            raise self._wrong(part.ending, f"is missing; {self._as_config()} needs it")
        tensor = self.source.raw(name)
        if tensor.dtype not in part.dtypes:
            wanted = " or ".join(map(_short, part.dtypes))
            raise self._wrong(part.ending, f"is {_short(tensor.dtype)}, expected {wanted} for {self._as_config()}")
        if part.shape is not None and tuple(tensor.shape) not in part.shapes:
            raise self._wrong(
                part.ending,
                f"has shape {list(tensor.shape)}, expected {list(part.shape)} for {self._as_config()} of a matrix "
                f"{list(self.shape)}{part.hint(tuple(tensor.shape))}",
            )
        return tensor

    def unpacked(self, layout: Layout, tensors: dict[str, Tensor]) -> Packed:
        ending = layout.mark.removeprefix(".")
        try:
            packed = layout.unpack(tensors, self.shape, self.config)
        except QuantError as error:
            raise self._wrong(ending, f"cannot be unpacked: {error}") from error
        if packed.shape != self.shape:
            raise self._wrong(
                ending, f"is of a matrix {list(packed.shape)}, expected {list(self.shape)} by config.json"
            )
        return packed

    def check_bias(self) -> None:
        """Quantizers write biases of zeros where the model has none."""
        name = f"{self.module}.bias"
        if name in self.source and bool(self.source.raw(name).any()):
            raise self._wrong("bias", "is not zero, but this model has no biases: the weights belong to another model")

    def _wrong(self, ending: str, what: str) -> WeightsError:
        name = f"{self.module}.{ending}"
        return WeightsError(f"{self.source.file(name)}: tensor {name} {what}")

    def _as_config(self) -> str:
        return f"{self.config.name} ({self.config.origin.name})"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
