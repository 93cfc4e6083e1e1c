"""What a model will take of a device and what fits beside it, told before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.engine.memory import MemoryPlan, survey_memory
from minicpm_cli.engine.memory_ledger import Kind, Measured, PastError, errors_of, fixed_of, past, record, shape_of
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.llm.demand import demand_of, wanted
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.settings import LoadOptions
from minicpm_cli.units import size

USUAL_CONTEXT = 530 << 20  # bytes that a CUDA context takes where nobody has measured it


@dataclass(frozen=True, slots=True)
class Place:
    """A device: `free` bytes, of which `fixed` go to its context unless it is there already (`total` 0: unknown)."""

    device: str
    dtype: str
    free: int
    total: int = 0
    fixed: int = 0
    context_is_there: bool = False

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Survey:
    """`fetch`: bytes still to be downloaded; `past`: how far earlier plans for this kind of run were off."""

    files: ModelFiles
    fetch: int
    checkpoint: Checkpoint
    stored: Mapping[str, int]
    place: Place
    plan: MemoryPlan
    kind: Kind
    past: tuple[PastError, ...]

    def rows(self) -> list[tuple[str, str]]:
        """For people; the verdict last."""
        plan, cfg = self.plan, self.checkpoint.cfg
        rows = [
            ("model", f"{cfg.architecture}, {cfg.parameters / 1e9:.2f}B parameters, made for {cfg.context} tokens"),
            ("files", self._files()),
            ("weights", f"{size(plan.weights)} in memory, {self.kind.scheme}"),
            ("cache", f"{plan.kv_per_token:,} bytes a token, {self.kind.kv}"),
            ("workspace", _phases(plan)),
            ("context", f"{size(self.place.fixed)}{' (there already)' if self.place.context_is_there else ''}"),
            ("memory", self._memory()),
            ("largest context", f"{plan.largest_context} tokens, one sequence"),
            ("largest batch", f"{plan.largest_batch} sequences of {min(plan.context, cfg.context)} tokens each"),
        ]
        rows = [row for row in rows if row[0] != "context" or self.place.fixed]
        return [*rows, *((f"past error, {e.phase}", _error(e)) for e in self.past), ("verdict", plan.verdict)]

    def record(self) -> dict[str, Any]:
        """JSON values."""
        plan, cfg = self.plan, self.checkpoint.cfg
        return {
            "model": self.files.name,
            "revision": self.files.revision,
            "architecture": cfg.architecture,
            "parameters": cfg.parameters,
            "trained_context": cfg.context,
            "fetch_bytes": self.fetch,
            "stored_bytes": dict(self.stored),
            "device": self.place.device,
            "free_bytes": plan.free,
            "total_bytes": self.place.total or None,
            "budget_bytes": plan.budget,
            "fixed_bytes": self.place.fixed,
            "weight_bytes": plan.weights,
            "scheme": self.kind.scheme,
            "kv_dtype": self.kind.kv,
            "kv_bytes_per_token": plan.kv_per_token,
            "workspace_bytes": asdict(plan.phases),
            "peak_bytes": plan.peaks,
            "context": plan.context,
            "max_seqs": plan.max_seqs,
            "max_batch_tokens": plan.max_batch_tokens,
            "cache_tokens": plan.cache_tokens,
            "cache_bytes": plan.cache,
            "largest_context": plan.largest_context,
            "largest_batch": plan.largest_batch,
            "fits": plan.fits,
            "verdict": plan.verdict,
        }

    def _files(self) -> str:
        kinds = ", ".join(f"{size(count)} {kind}" for kind, count in self.stored.items()) or "PyTorch's own format"
        return f"{kinds}; {size(self.fetch)} to fetch" if self.fetch else kinds

    def _memory(self) -> str:
        total = f" of {size(self.place.total)}" if self.place.total else ""
        return f"{size(self.plan.free)} free{total} on {self.place.device}, {size(self.plan.budget)} may be used"


def survey(options: LoadOptions, files: ModelFiles, fetch: int, place: Place, cache: Path) -> Survey:
    """Of the model in `files`, of which no more than the headers need be there.

    Raises ConfigError, WeightsError, UnsupportedModel or UsageError, never OutOfMemory.
    """
    checkpoint = Checkpoint.read(files.path).with_options(options)
    demand = demand_of(checkpoint, options, place.dtype, cpu=place.cpu)
    fixed = 0 if place.context_is_there else place.fixed
    plan = survey_memory(demand, place.free, wanted(options, demand.form, fixed))
    kind = kind_of(checkpoint, options, place.device, place.dtype)
    errors = tuple(errors_of(kind, past(cache)))
    return Survey(files, fetch, checkpoint, checkpoint.stored(), place, plan, kind, errors)


def kind_of(checkpoint: Checkpoint, options: LoadOptions, device: str, dtype: str) -> Kind:
    kv = KVFormat.of(options.kv_dtype, dtype).name
    return Kind(shape_of(checkpoint.cfg), checkpoint.scheme(dtype), kv, device)


def place_of(options: LoadOptions, cache: Path, free: int | None) -> Place:
    """The device of this machine, or one with `free` bytes that may be elsewhere. Raises DeviceError."""
    if free is not None:
        return _elsewhere(options, cache, free)
    from minicpm_cli.llm import device as here

    before = here.free_by_driver() if options.device != "cpu" else {}
    chosen = here.choose_device(options.device)
    dtype = here.dtype_name(here.choose_dtype(options.dtype, chosen))
    if chosen.type == "cpu":
        return Place("cpu", dtype, here.free_bytes(chosen), here.total_bytes(chosen))
    fixed, name = here.context_bytes(chosen, before), here.device_name(chosen)
    if fixed:
        record(cache, [Measured(Kind("", "", "", name), "fixed", USUAL_CONTEXT, fixed, fixed, 0, 0, 0)])
    return Place(name, dtype, here.free_bytes(chosen), here.total_bytes(chosen), fixed, context_is_there=True)


def _elsewhere(options: LoadOptions, cache: Path, free: int) -> Place:
    """Without asking any device. A context takes what it took here, where that is known."""
    dtype = "bf16" if options.dtype == "auto" else options.dtype
    if options.device == "cpu":
        return Place("cpu", dtype, free)
    known = [line.kind.device for line in past(cache) if line.phase == "fixed"]
    fixed = fixed_of(known[-1], past(cache)) if known else None
    return Place("another device", dtype, free, fixed=fixed or USUAL_CONTEXT)


def _phases(plan: MemoryPlan) -> str:
    named = asdict(plan.phases)
    limits = {"prefill": f" ({plan.max_batch_tokens} tokens)", "decode": f" ({plan.max_seqs} sequences)"}
    return ", ".join(f"{name} {size(count)}{limits.get(name, '')}" for name, count in named.items() if count)


def _error(past: PastError) -> str:
    runs = "1 run" if past.count == 1 else f"{past.count} runs"
    return f"{past.mean:+.1%} on average, {past.worst:+.1%} ({size(abs(past.worst_bytes))}) at worst, of {runs}"
