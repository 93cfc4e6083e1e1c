"""One block of the decoder over whole calibration rows, with a look at what its linear layers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.ops import ops_for
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Block
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.mlp import MixtureOfExperts
from minicpm_cli.model.rope import Rotary
from minicpm_cli.model.weights import Weights
from minicpm_cli.quantize.layers import Half, block_prefix
from quant.linear import Linear

Look = Callable[[Tensor], None]


class Held:
    """The tensors of one block as a source that a Block pulls from; several may be built from it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self.shape(name) == tuple(shape), (name, self.shape(name), shape)
        return self._tensors[name]

    def ignore(self, name: str) -> None:
        """Nothing is accounted for here."""

    def finish(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How `rows` sequences of `length` tokens lie in a step: each is one page of a scratch cache, attended causally."""

    batch: ForwardBatch
    cache: LayerCache
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cfg: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> Layout:
        places = torch.arange(rows * length, device=device)
        positions = torch.arange(length, device=device).repeat(rows)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        batch = ForwardBatch(
            ids=positions,  # not read: blocks work on hidden states
            positions=positions,
            slots=places,
            q_start=starts * length,
            kv_len=torch.full((rows,), length, dtype=torch.int32, device=device),
            page_table=starts[:rows, None],
            last=places[length - 1 :: length],
            max_q=length,
            max_kv=length,
            page_size=length,
            q_lens=(length,) * rows,
            kv_lens=(length,) * rows,
            runs=tuple(range(rows)),
        )
        cache = KVCache.allocate(replace(cfg, layers=1), rows, length, device, dtype).layers[0]
        return cls(batch, cache, *Rotary(cfg.rope, cfg.context, device)(positions))


class Reached(Exception):
    """Ends a pass early, once its last input has been seen."""


class Tap:
    """A linear layer that shows its input on the way."""

    def __init__(self, layer: Linear, look: Look) -> None:
        self.layer, self._look = layer, look

    @property
    def out_features(self) -> int:
        return self.layer.out_features

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        self._look(x)
        return self.layer(x)

    def dequantize(self) -> Tensor:
        return self.layer.dequantize()


class Probe:
    """A block made of `tensors` (by checkpoint name), run half by half on hidden states [T, H]."""

    def __init__(
        self,
        cfg: ModelConfig,
        index: int,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        prefix = block_prefix(index).removesuffix(".")
        self.block: Any = Block(cfg, Weights(Held(tensors), device, dtype), prefix, ops_for(device))
        if isinstance(self.block.mlp, MixtureOfExperts):
            self.block.mlp.joined = None  # the experts' inputs are seen only where each of them runs

    def run(self, half: Half, h: Tensor, layout: Layout) -> Tensor:  # [T, H]
        """The residual stream behind the half."""
        if half == "mlp":
            return self.block.feed_forward(h)  # type: ignore[no-any-return]
        return self.block.attend(h, layout.cos, layout.sin, layout.batch, layout.cache)  # type: ignore[no-any-return]

    def add(self, half: Half, h: Tensor, x: Tensor) -> Tensor:  # [T, H], [T, K]
        """The same, where the input of the half's last layer is known."""
        layer = self.block.mlp.down if half == "mlp" else self.block.attention.out
        return torch.add(h, layer(x), alpha=self.block.residual_scale)

    @contextmanager
    def tapped(self, looks: Mapping[str, Look]) -> Iterator[None]:
        """While it lasts, what passes a tap of `looks` is shown to its look; a look may raise Reached."""
        undo = [self._tap(path, look) for path, look in looks.items()]
        try:
            yield
        finally:
            for restore in undo:
                restore()

    def _tap(self, path: str, look: Look) -> Callable[[], None]:
        if path == "attention.latent":
            return self._tap_latent(look)
        if path == "mlp.chosen":
            return self._tap_chosen(look)
        *owners, name = path.split(".")
        owner = self.block
        for part in owners:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        layer = getattr(owner, name)
        setattr(owner, name, Tap(layer, look))
        return lambda: setattr(owner, name, layer)

    def _tap_latent(self, look: Look) -> Callable[[], None]:
        """kv_b is absorbed, so that no product reads its input: the latent as it leaves its norm."""
        attention = self.block.attention
        ops = attention.ops

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            normed: Tensor = ops.rms_norm(x, weight, eps)
            if weight is attention.kv_norm:
                look(normed)
            return normed

        attention.ops = ops._replace(rms_norm=rms_norm)

        def restore() -> None:
            attention.ops = ops

        return restore

    def _tap_chosen(self, look: Look) -> Callable[[], None]:
        """The experts that a router chooses, [T, active]."""
        mlp = self.block.mlp
        route = mlp.route

        def seen(x: Tensor) -> tuple[Tensor, Tensor]:
            chosen, shares = route(x)
            look(chosen)
            return chosen, shares

        mlp.route = seen

        def restore() -> None:
            del mlp.route

        return restore
