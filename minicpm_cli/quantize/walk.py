"""Block by block through the model: gather what each layer reads, quantize it, and move on behind the quantized block.

True-sequential: the inputs of a stage come from the layers before it as they were quantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.lora import Adapter
from minicpm_cli.quantize.block import Probe
from minicpm_cli.quantize.folder import WorkFolder
from minicpm_cli.quantize.gather import Inputs, gather, gather_both
from minicpm_cli.quantize.layers import Half, Stage, block_shapes, stages
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.report import LayerReport
from minicpm_cli.quantize.solve import Solution, restored, solve
from minicpm_cli.quantize.stream import Stream
from minicpm_cli.quantize.tensors import read_tensors, written

HALVES: tuple[Half, ...] = ("attention", "mlp")
REPORTS = "layers"
Progress = Callable[[int, str], None]  # (blocks done, what happens now)


def part_name(index: int) -> str:
    return f"block-{index:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Walk:
    """`calibration` and `heldout` move behind the quantized blocks; behind the source's own do `original`, the held-out
    text again, and `full`, the calibration again, where weights are corrected."""

    path: Path
    cfg: ModelConfig
    recipe: Recipe
    device: torch.device
    dtype: torch.dtype
    work: WorkFolder
    calibration: Stream | None
    heldout: Stream | None
    original: Stream | None
    full: Stream | None
    adapter: Adapter | None = None

    def run(self, on_progress: Progress) -> list[LayerReport]:
        """All blocks; those that an earlier run finished are only passed. Raises ModelError or FileError."""
        reports = []
        for index in range(self.cfg.layers):
            on_progress(index, "")
            with torch.inference_mode():
                reports += self._block(index, lambda what, index=index: on_progress(index, what))  # type: ignore[misc]
        on_progress(self.cfg.layers, "")
        return reports

    def _block(self, index: int, say: Callable[[str], None]) -> list[LayerReport]:
        source = read_tensors(self.path, self.cfg, block_shapes(self.cfg, index), self.adapter)
        before = self._probe(index, source) if self.full is not None else None
        if self.original is not None:
            self._pass(before or self._probe(index, source), [self.original], HALVES)
        saved = self.work.load(part_name(index))
        if saved is not None:
            tensors, notes = saved
            if before is not None and self.full is not None:
                self._pass(before, [self.full], HALVES)
            self._pass(self._probe(index, self._restored(index, tensors)), self._streams, HALVES)
            return [LayerReport(**record) for record in json.loads(notes[REPORTS])]
        solutions = self._solve(index, source, before, say)
        reports = [solution.report for solution in solutions.values()]
        self._save(index, source, solutions, reports)
        return reports

    @property
    def _streams(self) -> list[Stream]:
        return [stream for stream in (self.calibration, self.heldout) if stream is not None]

    def _probe(self, index: int, tensors: Mapping[str, Tensor]) -> Probe:
        return Probe(self.cfg, index, tensors, self.device, self.dtype)

    def _pass(self, probe: Probe, streams: Sequence[Stream], halves: Sequence[Half]) -> None:
        for stream in streams:
            for half in halves:
                stream.pass_half(probe, half)

    def _solve(
        self, index: int, source: Mapping[str, Tensor], before: Probe | None, say: Callable[[str], None]
    ) -> dict[str, Solution]:
        """Quantizes the block's layers and moves the streams behind it."""
        current = {name: written(tensor).to(self.device, self.dtype) for name, tensor in source.items()}
        solutions: dict[str, Solution] = {}
        todo = stages(self.cfg, index, self.recipe)
        for half in HALVES:
            within = [stage for stage in todo if stage.half == half]
            kept: list[Tensor] = []
            for stage in within:
                say(stage.groups[0].tap)
                gathered = self._gather(stage, self._probe(index, current), before, kept)
                for group in stage.groups:
                    weights = [source[layer.tensor].to(self.device).float() for layer in group.layers]
                    for solution in solve(group, weights, gathered.pop(group.tap, None), self.recipe, self.dtype):
                        solutions[solution.layer.name] = solution
                        current[solution.layer.tensor] = solution.weight
            if self._streams:
                self._move(self._probe(index, current), half, kept)
            if before is not None and self.full is not None and not any(stage.adds for stage in within):
                self._pass(before, [self.full], [half])
        return solutions

    def _move(self, probe: Probe, half: Half, kept: list[Tensor]) -> None:
        """The streams behind the half; where the inputs of its last layer were kept, by these."""
        if kept and self.calibration is not None:
            self.calibration.add(probe, half, kept)
        elif self.calibration is not None:
            self._pass(probe, [self.calibration], [half])
        if self.heldout is not None:
            self._pass(probe, [self.heldout], [half])

    def _gather(self, stage: Stage, probe: Probe, before: Probe | None, kept: list[Tensor]) -> dict[str, Inputs]:
        """The statistics of what each group of the stage reads; none where the method needs none."""
        if self.calibration is None or not self.recipe.calibrates:
            return {}
        last = stage.groups[-1]
        keep = kept if last.adds and not last.expert and self.calibration.keeps(last.columns) else None
        if self.full is None or before is None:
            return gather(stage, probe, self.calibration, self.device, keep)
        return gather_both(stage, (probe, before), (self.calibration, self.full), self.device, keep)

    def _restored(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The block's tensors as a finished part holds them."""
        plain = dict(tensors)
        for stage in stages(self.cfg, index, self.recipe):
            for layer in (layer for group in stage.groups for layer in group.layers):
                start = len(layer.name) + 1
                own = {n[start:]: plain.pop(n) for n in list(plain) if n.startswith(layer.name + ".")}
                plain[layer.tensor] = restored(own, self.recipe.scheme, self.device)
        return plain

    def _save(
        self, index: int, source: Mapping[str, Tensor], solutions: Mapping[str, Solution], reports: list[LayerReport]
    ) -> None:
        tensors: dict[str, Tensor] = {}
        for name, tensor in source.items():
            solution = solutions.get(name.removesuffix(".weight"))
            if solution is None:
                tensors[name] = written(tensor)
            else:
                tensors |= {f"{solution.layer.name}.{suffix}": t for suffix, t in solution.tensors.items()}
        self.work.save(part_name(index), tensors, {REPORTS: json.dumps([asdict(report) for report in reports])})
