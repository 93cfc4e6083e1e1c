"""What the layers of a stage read, gathered over the calibration tokens: behind the quantized layers, and in step with
that behind the original ones, so that a layer's weights can make up for the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minicpm_cli.quantize.block import Look, Probe, Reached
from minicpm_cli.quantize.layers import Group, Stage
from minicpm_cli.quantize.stream import Stream
from quant.correction import Shift, Wanted
from quant.hessian import Hessian

ROUTED, CHOSEN = "mlp.router", "mlp.chosen"  # what a router reads, and the experts that it chooses


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of the layers of a group; `aim` None: they are not corrected."""

    hessian: Hessian
    aim: Shift | Wanted | None

    @classmethod
    def plain(cls, group: Group, device: torch.device) -> Inputs:
        return cls(Hessian(group.columns, device), None)

    @classmethod
    def corrected(cls, group: Group, device: torch.device) -> Inputs:
        """A layer that adds to the residual stream makes up for what the stream has lost, too."""
        k, hessian = group.columns, Hessian(group.columns, device)
        return cls(hessian, Wanted(group.layers[0].rows, k, device) if group.adds else Shift(k, device))


def gather(
    stage: Stage, probe: Probe, stream: Stream, device: torch.device, kept: list[Tensor] | None = None
) -> dict[str, Inputs]:
    """By tap, of the block as it is; the states stay where they are. What passes the last tap is put into `kept`."""
    found = {group.tap: Inputs.plain(group, device) for group in stage.groups}
    with probe.tapped(_ending({tap: inputs.hessian.add for tap, inputs in found.items()}, kept)):
        stream.look(probe, stage.half)
    return found


def gather_both(
    stage: Stage,
    probes: tuple[Probe, Probe],  # the block as it is, and as it was
    streams: tuple[Stream, Stream],  # of the same tokens behind the quantized and the original blocks
    device: torch.device,
    kept: list[Tensor] | None = None,
) -> dict[str, Inputs]:
    """By tap, with what the original layers read or add. A stage that adds to the residual stream moves the original
    stream behind its half. What passes the quantized block's last tap is put into `kept`."""
    (probe, original), (ours, theirs) = probes, streams
    pair = Pair({group.tap: Inputs.corrected(group, device) for group in stage.groups}, original)
    keeps = pair.keeps()
    with probe.tapped(_ending(pair.counts(), kept)), original.tapped(keeps if stage.adds else _ending(keeps)):
        for part in ours.parts():
            h, full = ours.state(part), theirs.state(part)
            behind = theirs.run(part, original, stage.half)
            pair.stream(h, full, behind)
            ours.run(part, probe, stage.half)
            if behind is not None:
                theirs.put(part, behind)
    return pair.inputs


class Pair:
    """Statistics of a stage. The original block passes some tokens first, then the quantized one passes the same."""

    def __init__(self, inputs: dict[str, Inputs], original: Probe) -> None:
        self.inputs = inputs
        self._lost: Tensor | None = None  # [T, H], by the residual stream, in sizes of the layers' outputs
        self._added: Tensor | None = None  # [T, H], what the half should add to it
        self._full: dict[str, Tensor] = {}  # [T, K], by tap of the original block
        self._chosen: Tensor | None = None  # [T, active], by the quantized block's router
        self._original = original

    def keeps(self) -> dict[str, Look]:
        """At the original block, where not its output alone is wanted. Which of its experts another router will choose,
        nobody knows yet."""
        read = [tap for tap, one in self.inputs.items() if isinstance(one.aim, Shift) or _expert(tap) is not None]
        taps = dict.fromkeys(tap if _expert(tap) is None else ROUTED for tap in read)
        return {tap: partial(self._full.__setitem__, tap) for tap in taps}

    def counts(self) -> dict[str, Look]:
        """At the quantized block."""
        looks: dict[str, Look] = {tap: partial(self._count, tap) for tap in self.inputs}
        if any(_expert(tap) is not None for tap in looks):
            return {CHOSEN: self._choose} | looks
        return looks

    def stream(self, h: Tensor, full: Tensor, behind: Tensor | None) -> None:  # [T, H] each
        """States before the half, and of the original stream behind it, too."""
        scale = self._original.block.residual_scale
        self._lost = (full.float() - h.float()) / scale
        self._added = None if behind is None else (behind.float() - h.float()) / scale

    def _choose(self, chosen: Tensor) -> None:
        self._chosen = chosen

    def _count(self, tap: str, x: Tensor) -> None:
        inputs, expert = self.inputs[tap], _expert(tap)
        inputs.hessian.add(x)
        if isinstance(inputs.aim, Shift):
            inputs.aim.add(x, self._full[tap] if expert is None else self._full[ROUTED][self._rows(expert)])
        elif inputs.aim is not None:
            y = self._added if expert is None else self._at_expert(expert)
            assert y is not None
            inputs.aim.add(x, y)

    def _rows(self, expert: int) -> Tensor:  # [T']
        """Of the tokens that the quantized block sends there."""
        assert self._chosen is not None
        return torch.where(self._chosen == expert)[0]

    def _at_expert(self, expert: int) -> Tensor:  # [T', H]
        """What the expert should put out: the shares of a token's experts sum to 1, and so they share what is lost."""
        rows = self._rows(expert)
        assert self._lost is not None
        y: Tensor = self._original.block.mlp.experts[expert](self._full[ROUTED][rows])
        return y + self._lost[rows]


def _expert(tap: str) -> int | None:
    return int(tap.split(".")[2]) if ".experts." in tap else None


def _ending(looks: Mapping[str, Look], kept: list[Tensor] | None = None) -> dict[str, Look]:
    """The last of dense looks keeps what it saw and ends the pass; which expert is the last, nobody knows before."""
    last = list(looks)[-1]
    if ".experts." in last:
        return dict(looks)

    def see_and_stop(x: Tensor) -> None:
        looks[last](x)
        if kept is not None:
            kept.append(x)
        raise Reached

    return dict(looks) | {last: see_and_stop}
