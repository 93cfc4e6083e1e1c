"""The whole of a quantization: plan, calibrate, walk, measure, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minicpm_cli.errors import FileError, OutOfMemory
from minicpm_cli.hub.files import sha256
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.shapes import tensor_shapes
from minicpm_cli.quantize import companions, output, schema
from minicpm_cli.quantize.calibration import SELF, Amount, amount, check_amount, from_file
from minicpm_cli.quantize.ends import Kept, Window, embedder, head_of
from minicpm_cli.quantize.folder import WorkFolder, check_target
from minicpm_cli.quantize.layers import linear_layers, refuse_misfits
from minicpm_cli.quantize.memory import Meter
from minicpm_cli.quantize.outer import OUTER, Outer, check_head, read_outer
from minicpm_cli.quantize.plan import Machine, Plan, make_plan
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.report import LayerReport, Measured, Peak, Quality, Report
from minicpm_cli.quantize.samples import model_samples
from minicpm_cli.quantize.stream import Stream
from minicpm_cli.quantize.tensors import check_tensors, holds_head, stored_bytes
from minicpm_cli.quantize.walk import Walk, part_name

CALIBRATION, ROWS = "calibration.safetensors", "ids"
FORMAT = 1  # of the work folder
Listen = Callable[[str, int, int, str], None]  # (phase, done, of how many, unit)


class Judge(Protocol):
    """Measures the result on held-out text; what it is made of lies in another layer."""

    @property
    def name(self) -> str: ...
    @property
    def windows(self) -> Sequence[Window]: ...
    def compare(self, model: Kept, reference: Kept) -> Quality: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One quantization of the model at `path`. `identity` changes when its files do; `judge` None: not measured."""

    name: str
    path: Path
    target: Path
    recipe: Recipe
    prompter: Prompter
    device: torch.device
    dtype: torch.dtype
    identity: Mapping[str, Any]
    machine: Machine
    judge: Judge | None = None
    fresh: bool = False

    @property
    def cfg(self) -> ModelConfig:
        return self.prompter.checkpoint.cfg

    @property
    def adapter(self) -> Adapter | None:
        """Merged into what is read, before anything is quantized."""
        return self.prompter.checkpoint.adapter

    @property
    def wide(self) -> bool:
        """Whether tensors that stay plain are stored otherwise than they will be written."""
        return companions.is_wide(self.path)

    @property
    def amount(self) -> Amount:
        return amount(self.recipe, self.cfg, cuda=self.device.type == "cuda")

    def manifest(self) -> dict[str, Any]:
        """What decides the written bytes."""
        calib = self.recipe.calib
        wanted = self.amount
        merged = {"adapter": self.adapter.digest} if self.adapter else {}
        return merged | {
            "format": FORMAT,
            "model": dict(self.identity),
            "recipe": self.recipe.identity(),
            "rows": [wanted.samples, wanted.seqlen],
            "calibration": calib if calib == SELF or not self.recipe.calibrates else sha256(Path(calib)),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def plan(job: Job) -> Plan:
    """Raises UsageError for patterns that name no layer, or a head that cannot be quantized."""
    if job.recipe.head_bits == 8 and job.cfg.tie and not holds_head(job.path, job.cfg, job.adapter):
        check_head(job.cfg, job.recipe, tie=True)
    held = sum(len(window.ids) for window in job.judge.windows) if job.judge else 0
    return make_plan(job.cfg, job.recipe, job.amount, held, job.machine, wide=job.wide)


def quantize(job: Job, listen: Listen) -> Report:
    """Writes the quantized folder. Raises UsageError, ModelError, FileError or DeviceError."""
    planned = plan(job)
    refuse_misfits(list(planned.misfits))
    work = WorkFolder(job.target)
    if not work.path.exists():
        check_target(job.target)
        _check_room(planned)
    source_config = companions.source_config(job.path)
    check_tensors(job.path, job.cfg, job.adapter)
    try:
        work.open(job.manifest(), fresh=job.fresh)
        record = output.ready(work)
        if record is None:
            record = dict(_make(job, planned, work, source_config, listen))
        output.move(work)
    finally:
        work.close()
    return Report.of(record)


def _check_room(planned: Plan) -> None:
    if planned.disk > planned.machine.disk_free:
        raise FileError(f"{planned.problem}. Free some space, or give an OUT on another disk.")
    if planned.problem:
        raise OutOfMemory(
            f"{planned.problem}. Fewer or shorter rows (--samples, --seqlen) or another --device may fit; --plan shows "
            "what takes how much."
        )


def _make(job: Job, planned: Plan, work: WorkFolder, config: Mapping[str, Any], listen: Listen) -> Mapping[str, Any]:
    """The walk and what comes before and after it, up to a folder that only has to be moved; returns the report."""
    begun, meter = time.monotonic(), Meter(job.device)
    outer = read_outer(job.path, job.cfg, job.recipe, work, job.adapter)
    ids = _calibration(job, work, listen)
    streams = _streams(job, ids, outer, work)
    resumed = sum(work.file(part_name(i)).exists() for i in range(job.cfg.layers))
    walk = Walk(job.path, job.cfg, job.recipe, job.device, job.dtype, work, *streams, adapter=job.adapter)
    layers = walk.run(lambda done, what: listen("quantizing", done, job.cfg.layers, what))
    quality = _quality(job, streams[1:3], outer, listen)
    listen("writing", 0, 1, "")

    def report(size: int) -> dict[str, Any]:
        return Report(
            model=job.name,
            output=str(job.target),
            recipe=job.recipe.name,
            device=job.machine.device,
            layers=layers,
            calibration=job.recipe.calib if job.recipe.calibrates else "",
            calibration_tokens=0 if ids is None else ids.numel(),
            quality=quality,
            heldout=job.judge.name if job.judge else "",
            source_bytes=stored_bytes(job.path),
            bytes=size,
            bits_per_weight=8 * size / job.cfg.parameters,
            seconds=time.monotonic() - begun,
            resumed=resumed,
            peak=Peak(planned.peak, meter.device_bytes, planned.host, meter.host_bytes),
            notes=tuple(_notes(job, layers, config, outer)),
            settings=job.manifest(),
        ).record()

    written = companions.output_config(config, _schema(job), narrowed=outer.narrowed, tie=outer.tie)
    parts = [OUTER, *(part_name(i) for i in range(job.cfg.layers))]
    return output.assemble(work, job.path, parts, written, report)


def _calibration(job: Job, work: WorkFolder, listen: Listen) -> Tensor | None:  # [R, S]
    """The rows of the first run where there was one. Raises UsageError for too few tokens."""
    if not job.recipe.calibrates:
        return None
    saved = work.load(CALIBRATION)
    if saved is not None:
        return saved[0][ROWS]
    if job.recipe.calib == SELF:
        check_amount(job.amount.tokens, job.cfg, job.recipe)
        told = lambda done, total: listen("sampling", done, total, "tokens")  # noqa: E731
        ids = model_samples(job.prompter, job.amount, job.recipe.seed, job.device, told)
    else:
        ids = from_file(Path(job.recipe.calib), job.amount, job.prompter.tokenizer, job.prompter.template)
    check_amount(ids.numel(), job.cfg, job.recipe)
    work.save(CALIBRATION, {ROWS: ids}, {})
    return ids


def _streams(
    job: Job, ids: Tensor | None, outer: Outer, work: WorkFolder
) -> tuple[Stream | None, Stream | None, Stream | None, Stream | None]:
    """Before the first block, as the walk wants them: what is twice there moves behind the original blocks, too."""
    windows = [list(window.ids) for window in job.judge.windows] if job.judge else []
    held = torch.tensor(windows) if windows else None
    ours, theirs = (embedder(job.cfg, tensors, job.dtype) for tensors in (outer.plain, outer.original))
    full = _stream(job, ids, theirs, work.file("original.bin")) if job.recipe.corrects else None
    return _stream(job, ids, ours, work.file("states.bin")), _stream(job, held, ours), _stream(job, held, theirs), full


def _stream(job: Job, ids: Tensor | None, embed: Callable[[Tensor], Tensor], file: Path | None = None) -> Stream | None:
    if ids is None:
        return None
    stream = Stream(job.cfg, ids, job.device, job.dtype, file)
    stream.start(embed)
    return stream


def _quality(job: Job, streams: tuple[Stream | None, Stream | None], outer: Outer, listen: Listen) -> Measured | None:
    ours, theirs = streams
    if job.judge is None or ours is None or theirs is None:
        return None
    listen("measuring", 0, 1, "")
    head = head_of(job.cfg, outer.original, job.device, job.dtype)
    other = head if outer.same else head_of(job.cfg, outer.plain, job.device, job.dtype)
    windows = job.judge.windows
    return Measured.of(job.judge.compare(Kept.of(ours, windows, other), Kept.of(theirs, windows, head)))


def _schema(job: Job) -> dict[str, Any]:
    routers = [n.removesuffix(".weight") for n in tensor_shapes(job.cfg) if n.endswith(".mlp.gate.weight")]
    layers = [layer.name for layer in linear_layers(job.cfg)]
    skipped = [name for name in layers if job.recipe.skips(name)]
    packed = [name for name in layers if not job.recipe.skips(name)]
    return schema.quantization_config(job.recipe, [*routers, *skipped], packed, head=job.recipe.head_bits == 8)


def _notes(job: Job, layers: Sequence[LayerReport], config: Mapping[str, Any], outer: Outer) -> Iterator[str]:
    for layer in layers:
        if layer.note:
            yield f"{layer.name}: {layer.note}"
    if job.adapter:
        yield f"the adapter {job.adapter.folder} ({job.adapter.label}) was merged before anything was quantized"
    if outer.narrowed:
        yield "what stays plain was wider than bf16 in the original and is written as bf16"
    if companions.has_code(job.path, config):
        yield companions.CODE_NOTE.format(architecture=job.cfg.architecture)
    yield from filter(None, (schema.unread_group(job.recipe), schema.unread_by_transformers(_schema(job))))
