"""A checkpoint with an adapter: each matrix is merged as it is taken, in float32, and rounded once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minicpm_cli.model.lora import Adapter, Pair, stays_beside
from minicpm_cli.model.lora_files import AdapterTensors
from minicpm_cli.model.shapes import EMBED, HEAD
from minicpm_cli.model.source import Stored, TensorSource


@dataclass(frozen=True, slots=True)
class Factors:
    """What is to be added to x @ W.T: (x @ a.T) @ b.T. Both are float32, the scale is in `b`."""

    a: Tensor  # [rank, K]
    b: Tensor  # [N, rank]


@dataclass(slots=True)
class LoraSource:
    """A TensorSource. Merged matrices come in `dtype`, or in float32 where something else rounds them.

    The factors of a matrix that the checkpoint holds packed are put into `beside`, under its name, when it is taken;
    with `unpack` it comes merged as well.
    """

    inner: TensorSource
    adapter: Adapter
    dtype: torch.dtype = torch.float32
    unpack: bool = False
    beside: dict[str, Factors] = field(default_factory=dict)
    _tensors: AdapterTensors = field(init=False)

    def __post_init__(self) -> None:
        self._tensors = AdapterTensors(self.adapter.file)

    def __contains__(self, name: str) -> bool:
        return name in self.inner or name in self._added

    def names(self) -> set[str]:
        return self.inner.names() | self._added

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(self._stored_as(name))

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self.inner.take(self._stored_as(name), shape)
        if source := self._replacement(name):
            stored = self._tensors[source]
        pair = self.adapter.pairs.get(name)
        if pair is None:
            return stored
        factors = self._factors(pair)
        if not isinstance(stored, Tensor):
            if stays_beside(name) and not self.unpack:
                self.adapter.check_beside(name)
                self.beside[name] = factors
                return stored
            stored = stored.dequantize()
        whole = merged(stored, factors)
        if pair.magnitude is not None:
            rescale(whole, self._tensors[pair.magnitude].float())
        return whole.to(self.dtype)

    def ignore(self, name: str) -> None:
        if name in self.inner:
            self.inner.ignore(name)

    def finish(self) -> None:
        self._tensors.close()
        self.inner.finish()

    @property
    def _added(self) -> set[str]:
        """The head, where the checkpoint's is the embedding and the adapter's is not."""
        return {HEAD} if self.adapter.unties else set()

    def _stored_as(self, name: str) -> str:
        return EMBED if name in self._added and name not in self.inner else name

    def _replacement(self, name: str) -> str | None:
        replaced = self.adapter.replaced
        if name not in replaced and name in (EMBED, HEAD) and self.adapter.config.ties:
            name = HEAD if name == EMBED else EMBED
        return replaced.get(name)

    def _factors(self, pair: Pair) -> Factors:
        a, b = self._tensors[pair.a].float(), self._tensors[pair.b].float()
        if pair.transposed:
            a, b = b.T, a.T
        return Factors(a, b * pair.scale)


def merged(weight: Tensor, factors: Factors) -> Tensor:  # [N, K] float32
    """W + B A, where W is; W itself stays as it is."""
    a, b = factors.a.to(weight.device), factors.b.to(weight.device)
    return weight.to(torch.float32, copy=True).addmm_(b, a)


def rescale(weight: Tensor, magnitude: Tensor) -> None:  # [N, K], [N] float32
    """Gives each row its length (DoRA); one of zeros has none."""
    lengths = torch.linalg.vector_norm(weight, dim=1).clamp_min_(torch.finfo(torch.float32).tiny)
    weight.mul_((magnitude.to(weight.device) / lengths).unsqueeze(1))
