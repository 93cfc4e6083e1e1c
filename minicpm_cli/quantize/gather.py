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
from quant.correction import Shift
from quant.hessian import Hessian

ROUTED, CHOSEN = "mlp.router", "mlp.chosen"  # what a router reads, and the experts that it chooses


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of the layers of a group; `shift` None: they are not corrected."""

    hessian: Hessian
    shift: Shift | None

    @classmethod
    def of(cls, group: Group, device: torch.device, *, corrects: bool) -> Inputs:
        rows = group.layers[0].rows if group.adds else 0
        return cls(Hessian(group.columns, device), Shift(group.columns, device, rows) if corrects else None)


def gather(stage: Stage, probe: Probe, stream: Stream, device: torch.device) -> dict[str, Inputs]:
    """By tap, of the block as it is; the states stay where they are."""
    found = {group.tap: Inputs.of(group, device, corrects=False) for group in stage.groups}
    with probe.tapped(_ending({tap: inputs.hessian.add for tap, inputs in found.items()})):
        stream.look(probe, stage.half)
    return found


def gather_both(
    stage: Stage,
    probes: tuple[Probe, Probe],  # the block as it is, and as it was
    streams: tuple[Stream, Stream],  # of the same tokens behind the quantized and the original blocks
    device: torch.device,
    *,
    move: bool,  # the original stream behind the half, as all of it is computed anyway
) -> dict[str, Inputs]:
    """By tap, with the difference between the streams."""
    (probe, original), (ours, theirs) = probes, streams
    pair = Pair({group.tap: Inputs.of(group, device, corrects=True) for group in stage.groups}, original)
    kept = pair.keeps()
    with probe.tapped(_ending(pair.counts())), original.tapped(kept if move else _ending(kept)):
        for part in ours.parts():
            h, full = ours.state(part), theirs.state(part)
            behind = theirs.run(part, original, stage.half)
            pair.lost = (full - h) / original.block.residual_scale
            ours.run(part, probe, stage.half)
            if behind is not None:
                theirs.put(part, behind)
    return pair.inputs


class Pair:
    """Statistics of a stage. The original block passes some tokens first, then the quantized one passes the same."""

    def __init__(self, inputs: dict[str, Inputs], original: Probe) -> None:
        self.inputs = inputs
        self.lost: Tensor | None = None  # [T, H], by the residual stream, in sizes of the layers' outputs
        self._full: dict[str, Tensor] = {}  # [T, K], by tap of the original block
        self._chosen: Tensor | None = None  # [T, active], by the quantized block's router
        self._original = original

    def keeps(self) -> dict[str, Look]:
        """At the original block. Which of its experts another router will choose, nobody knows yet."""
        taps = dict.fromkeys(ROUTED if _expert(tap) is not None else tap for tap in self.inputs)
        return {tap: partial(self._full.__setitem__, tap) for tap in taps}

    def counts(self) -> dict[str, Look]:
        """At the quantized block."""
        looks: dict[str, Look] = {tap: partial(self._count, tap) for tap in self.inputs}
        if any(_expert(tap) is not None for tap in looks):
            return {CHOSEN: self._choose} | looks
        return looks

    def _choose(self, chosen: Tensor) -> None:
        self._chosen = chosen

    def _count(self, tap: str, x: Tensor) -> None:
        inputs, expert = self.inputs[tap], _expert(tap)
        assert inputs.shift is not None
        assert self.lost is not None
        full, lost = self._full.get(tap), self.lost
        if expert is not None:
            assert self._chosen is not None
            rows = torch.where(self._chosen == expert)[0]
            full, lost = self._at_expert(tap, expert, self._full[ROUTED][rows]), lost[rows]
        assert full is not None
        inputs.hessian.add(x)
        inputs.shift.add(x, full, lost if inputs.shift.rows else None)

    def _at_expert(self, tap: str, expert: int, routed: Tensor) -> Tensor:  # [T', H] -> [T', K]
        """What the original expert would have read of the tokens that the quantized block sends there."""
        mlp = self._original.block.mlp.experts[expert]
        full: Tensor = mlp.activate(mlp.gate_up(routed)) if tap.endswith(".down") else routed
        return full


def _expert(tap: str) -> int | None:
    return int(tap.split(".")[2]) if ".experts." in tap else None


def _ending(looks: Mapping[str, Look]) -> dict[str, Look]:
    """The last of dense looks ends the pass; which expert is the last, nobody knows before."""
    last = list(looks)[-1]
    if ".experts." in last:
        return dict(looks)

    def see_and_stop(x: Tensor) -> None:
        looks[last](x)
        raise Reached

    return dict(looks) | {last: see_and_stop}
