"""The tuple of operations that a decoder calls, chosen once for its device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache
from quant.kernels import targets


class Embed(Protocol):
    def __call__(self, ids: Tensor, table: Tensor, scale: float, /) -> Tensor: ...


class Angles(Protocol):
    def __call__(self, positions: Tensor, frequencies: Tensor, factor: float, /) -> tuple[Tensor, Tensor]: ...


class RMSNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class Rope(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, /) -> None: ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor, /) -> Tensor: ...


class ReluMul(Protocol):
    def __call__(self, gate_up: Tensor, threshold: float, /) -> Tensor: ...


class RopeStore(Protocol):
    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, cache: LayerCache, slots: Tensor, /
    ) -> None: ...


class Store(Protocol):
    def __call__(self, rows: Tensor, cache: LayerCache, slots: Tensor, /) -> None: ...


class Attend(Protocol):
    def __call__(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, /) -> Tensor: ...


class RopeAttend(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        cache: LayerCache,
        batch: ForwardBatch,
        scale: float,
        /,
    ) -> Tensor: ...


class Ops(NamedTuple):
    """The forms of minicpm_cli.kernels.reference, or what computes the same faster."""

    embed: Embed
    angles: Angles
    rms_norm: RMSNorm
    rope_: Rope
    rope_store: RopeStore
    store: Store
    silu_mul: SiluMul
    relu_mul: ReluMul
    attend: Attend
    rope_attend: RopeAttend


REFERENCE = Ops(
    reference.embed,
    reference.angles,
    reference.rms_norm,
    reference.rope_,
    reference.rope_store,
    reference.store,
    reference.silu_mul,
    reference.relu_mul,
    reference.attend,
    reference.rope_attend,
)


def ops_for(device: torch.device, folder: Path | None = None) -> Ops:
    """The operations for `device`: on CUDA the kernels, where Triton compiles them. `folder` keeps compiled ones."""
    if device.type != "cuda" or not targets.triton_compiles(device):
        return REFERENCE
    from minicpm_cli.kernels.gpu import kernels

    return kernels(device, folder)
