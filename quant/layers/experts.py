"""The experts of a mixture as two matrices on the GPU, each multiplied by all tokens' own experts in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from quant.kernels.layout import DeviceInt
from quant.layers.around import Gate
from quant.layers.plain import Linear


class Experts:
    """sum of share * down(gate(gate_up(x))) over each token's `active` strongest experts."""

    def __init__(
        self,
        gate_up: Tensor | DeviceInt,
        down: Tensor | DeviceInt,
        active: int,
        gate: Gate,
        folder: Path | None = None,  # of compiled kernels
    ) -> None:
        self.gate_up, self.down, self.active, self.gate, self.folder = gate_up, down, active, gate, folder

    def __call__(self, x: Tensor, router_logits: Tensor) -> Tensor:  # [T, H], [T, E] -> [T, H]
        from quant.kernels.moe import moe_forward

        return moe_forward(x, router_logits, self.gate_up, self.down, self.active, self.gate, self.folder)


def join_experts(
    gate_ups: Sequence[Linear], downs: Sequence[Linear], active: int, gate: Gate
) -> tuple[Experts, list[Linear], list[Linear]] | None:
    """The experts as one, and the layers anew, as views of what it holds. None: no kernel takes these layers."""
    if find_spec("triton") is None:
        return None
    first, second = stack(gate_ups), stack(downs)
    if first is None or second is None:
        return None
    from quant.kernels.moe import fits

    (gate_up, ups), (down, downs) = first, second
    dtype = gate_up.dtype if isinstance(gate_up, Tensor) else gate_ups[0].dtype  # type: ignore[attr-defined]
    if not fits(gate_up, down, dtype):
        return None
    folder = getattr(gate_ups[0], "folder", None)
    return Experts(gate_up, down, active, gate, folder), ups, list(downs)


def stack(layers: Sequence[Linear]) -> tuple[Tensor | DeviceInt, list[Linear]] | None:
    """Plain weights [E, N, K] or packed ones [E * N, K], and the layers over their parts; None where layers differ."""
    if not all(hasattr(layer, "gemv") for layer in layers):
        return None
    from quant.layers.cuda_dense import CUDADense
    from quant.layers.cuda_int import CUDAInt

    dense = [layer for layer in layers if isinstance(layer, CUDADense)]
    if len(dense) == len(layers):
        whole = torch.stack([layer.weight for layer in dense])
        return whole, [CUDADense(part, layer.gemv.folder) for part, layer in zip(whole, dense, strict=True)]
    ints = [layer for layer in layers if isinstance(layer, CUDAInt)]
    if len(ints) < len(layers) or any(_form(layer.packed) != _form(ints[0].packed) for layer in ints):
        return None
    packed, rows = _joined([layer.packed for layer in ints]), ints[0].packed.N
    parts = [_rows(packed, slice(i * rows, (i + 1) * rows)) for i in range(len(ints))]
    return packed, [layer.over(part) for part, layer in zip(parts, ints, strict=True)]


def _form(w: DeviceInt) -> tuple[object, ...]:
    return w.bits, w.group, w.words.shape, w.scale.dtype, w.zero is None, w.shift is None


def _joined(parts: Sequence[DeviceInt]) -> DeviceInt:
    words, scale = torch.cat([p.words for p in parts]), torch.cat([p.scale for p in parts])
    zero, shift = _cat([p.zero for p in parts]), _cat([p.shift for p in parts])
    return replace(parts[0], words=words, scale=scale, zero=zero, shift=shift)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [p for p in parts if p is not None]
    return torch.cat(there) if there else None


def _rows(w: DeviceInt, rows: slice) -> DeviceInt:
    def part(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[rows]

    return replace(w, words=w.words[rows], scale=w.scale[rows], zero=part(w.zero), shift=part(w.shift))
