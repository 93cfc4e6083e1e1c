"""Random weights in the place of a checkpoint: any member of the family can be timed without its files."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import Shape, tensor_shapes


class RandomSource:
    """A source of tensors (as model.source.TensorSource) drawn on `device` as they are asked for.

    A tensor depends on the seed and its name alone. Matrices have variance 1/K, so activations stay
    near one; norms are ones.
    """

    def __init__(self, cfg: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._shapes = tensor_shapes(cfg)
        self._open = set(self._shapes)
        self._device, self._dtype, self._seed = device, dtype, seed

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._known(name)

    def take(self, name: str, shape: Shape) -> Tensor:
        """The tensor `name`, once. Raises WeightsError when the model expects another shape."""
        actual = self._known(name)
        if actual != tuple(shape):
            raise WeightsError(f"random weights: {name} is {actual}, the model expects {tuple(shape)}")
        self._open.discard(name)
        return self._draw(name, actual)

    def ignore(self, name: str) -> None:
        self._open.discard(name)

    def finish(self) -> None:
        """Raises WeightsError when the model left a tensor out: it would do less work than the real one."""
        if self._open:
            raise WeightsError(f"random weights: {len(self._open)} tensors unused, such as {min(self._open)}")

    def _known(self, name: str) -> Shape:
        if name not in self._shapes:
            raise WeightsError(f"random weights: no tensor {name} in this shape")
        return self._shapes[name]

    def _draw(self, name: str, shape: Shape) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        generator = torch.Generator(device=self._device)
        generator.manual_seed(self._seed ^ zlib.crc32(name.encode()))
        weight = torch.empty(shape, device=self._device, dtype=self._dtype)
        return weight.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)
