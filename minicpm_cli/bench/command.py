"""`minicpm bench`: opens what is to be measured once, runs the workloads, gives rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from minicpm_cli.bench.rows import STEADY, Row, place
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.speed import HOSTS, WORKLOADS, Runner, Workload, host_ms, measure
from minicpm_cli.bench.start import STARTS, measure_start
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from minicpm_cli.bench.subject import Subject

KERNELS = "kernels"
CHOICES = (*WORKLOADS, *STARTS, KERNELS)
COLUMNS = (*WORKLOADS, *STARTS, *HOSTS)
USUAL = tuple(name for name in WORKLOADS if name != "throughput")
PEERS = ("transformers",)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`shape` measures random weights in the place of the model of `load`; no `workloads` means the usual ones.

    `against` repeats the workloads with another engine in the same process. `requests` shortens throughput, and
    `devices` shares it among an engine on each of them.
    """

    load: LoadOptions
    shape: str | None = None
    workloads: tuple[str, ...] = ()
    repeats: int = 3
    against: str | None = None
    json: bool = False
    requests: int | None = None
    devices: tuple[str, ...] = ()

    def checked(self) -> BenchOptions:
        """Itself. Raises UsageError before anything is loaded."""
        for name in self.workloads:
            if name not in CHOICES:
                raise UsageError(f"no workload is called {name!r}; choose from: {', '.join(CHOICES)}")
        if self.against not in (None, *PEERS):
            raise UsageError(f"--against {self.against!r} is not known; choose from: {', '.join(PEERS)}")
        for flag, count in (("--repeats", self.repeats), ("--requests", self.requests)):
            if count is not None and count < 1:
                raise UsageError(f"{flag} is {count}; it must be at least 1")
        if self.requests and "throughput" not in self.workloads:
            raise UsageError("--requests is for the workload throughput; name it too")
        if self.devices and (self.workloads != ("throughput",) or self.against):
            raise UsageError("--gpus and --workers are for the workload throughput; name it, and nothing else")
        if self.load.lora is not None and (self.shape is not None or self.against is not None):
            what = "random weights" if self.shape is not None else f"--against {self.against}"
            raise UsageError(f"--lora has no place beside {what}; leave one of the two out")
        if self.shape is not None:
            raw_config(self.shape)
        return self

    @property
    def speeds(self) -> list[Workload]:
        chosen = [WORKLOADS[name] for name in self.workloads or USUAL if name in WORKLOADS]
        return [self._sized(w) if w.name == "throughput" else w for w in chosen]

    def _sized(self, workload: Workload) -> Workload:
        """Each engine is warmed up as the only one is."""
        warm = workload.warm and workload.warm * max(len(self.devices), 1)
        return replace(workload.sized(self.requests), warm=warm)

    @property
    def load_flags(self) -> list[str]:
        """What a process of its own must be told to load the model so."""
        load, flags = self.load, ["--device", self.load.device, "--dtype", self.load.dtype]
        for name in ("quantize", "gptq_format", "ctx", "max_seqs", "max_batch_tokens", "lora"):
            value = getattr(load, name)
            flags += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        flags += ["--kv-dtype", load.kv_dtype] if load.kv_dtype != "auto" else []
        flags += [] if load.graphs else ["--no-graphs"]
        flags += ["--memory-fraction", str(load.memory_fraction)]
        return [*flags, "--head-bits", str(load.head_bits)]

    @property
    def starts(self) -> list[str]:
        return [name for name in self.workloads if name in STARTS]


def run_bench(
    options: BenchOptions, settings: Settings, out: TextIO = sys.stdout, err: TextIO = sys.stderr
) -> list[Row]:
    """Prints each row as it is measured: JSON lines, or a line to read. Progress goes to `err`."""
    rows = []
    for row in _measure(options.checked(), settings, err):
        print(row.to_json() if options.json else line(row), file=out, flush=True)
        if row.spread > STEADY and not settings.quiet:
            print(f"minicpm: {unsteady(row)}", file=err, flush=True)
        rows.append(row)
    return rows


def unsteady(row: Row) -> str:
    """What to say of runs that are not worth comparing."""
    return (
        f"{row.workload}: the runs differ by {row.spread:.0%}, so something else keeps this machine busy. "
        "Measure again when it is quiet."
    )


def line(row: Row) -> str:
    """A row for reading: `decode  61.2 tok/s  (60.8 to 61.9, 3 runs)  demo Q4_1 minicpm-cli on CPU, 2 threads`.

    An operation's: `norm, 8192 rows  3.9e+03 GB/s  (3.8e+03 to 3.9e+03, 3 runs)  92% of 4260`.
    """
    several = len(row.runs) > 1
    spread = f"({min(row.runs):.4g} to {max(row.runs):.4g}, {len(row.runs)} runs)" if several else "(1 run)"
    if row.limit:
        part = f"{row.value / row.limit:.0%} of {row.limit:.4g}"
        return f"{row.workload:<34}{row.value:>10.4g} {row.unit:<8} {spread:<32} {part}"
    what = f"{row.setting.model} {row.setting.scheme} {row.setting.engine} on {place(row.setting)}"
    return f"{row.workload:<12}{row.value:>10.4g} {row.unit:<6} {spread:<28} {what}"


def _measure(options: BenchOptions, settings: Settings, err: TextIO) -> Iterator[Row]:
    from minicpm_cli.bench.subject import open_subject

    say = _Notes(err, settings.quiet)
    subject = open_subject(options.load, options.shape, settings)
    if options.starts:
        threads = [] if settings.threads is None else ["--threads", str(settings.threads)]
        yield from _starts(options, subject, threads, say)
    if KERNELS in options.workloads:
        yield from _kernels(subject, say)
    if options.speeds:
        yield from _speeds("ours", options, subject, settings, say)
        if options.against:
            yield from _speeds(options.against, options, subject, settings, say)


def _starts(options: BenchOptions, subject: Subject, more: list[str], say: _Notes) -> Iterator[Row]:
    """Each in processes of its own, which get the load options and `more` flags."""
    flags = [*options.load_flags, *more]
    with subject.on_disk() as model:
        for name in options.starts:
            say(f"{name}: {STARTS[name][1]}")
            yield Row(subject.setting(), name, measure_start(name, model, options.repeats, flags), "s")


def _kernels(subject: Subject, say: _Notes) -> Iterator[Row]:
    from minicpm_cli.bench.kernels import measure_kernels

    say(f"{KERNELS}: operations one by one beside a copy and a matrix product")
    setting = subject.setting()
    for kernel in measure_kernels(subject.cfg, subject.device, subject.dtype, say, subject.checkpoint.kernels):
        yield Row(setting, kernel.name, kernel.rates, kernel.unit, kernel.limit)


def _speeds(engine: str, options: BenchOptions, subject: Subject, settings: Settings, say: _Notes) -> Iterator[Row]:
    """The rows of one engine; its model is freed at the end, before the next one is loaded."""
    ours = engine == "ours"
    say(f"loading {subject.name}" if ours else f"loading {subject.name} for {engine}")
    setting = subject.setting(options.devices) if ours else subject.peer_setting(engine)
    with _runner(options, subject, settings, ours=ours) as runner:
        for workload in options.speeds:
            say(f"{workload.name}: {workload.help}")
            runs = measure(runner, workload, vocab=subject.cfg.vocab, repeats=options.repeats)
            yield Row(setting, workload.name, tuple(map(workload.rate, runs)), workload.unit)
            gpu = setting.threads is None  # on a CPU the host's time is the computation itself
            if workload.host and gpu and all(run.host_seconds is not None for run in runs):
                yield Row(setting, workload.host, tuple(map(host_ms, runs)), "ms")


def _runner(
    options: BenchOptions, subject: Subject, settings: Settings, *, ours: bool
) -> AbstractContextManager[Runner]:
    if ours and options.devices:
        return subject.fleet_runner(options.devices, settings)
    return nullcontext(subject.runner() if ours else subject.peer_runner())


class _Notes:
    """What is going on, for whoever waits."""

    def __init__(self, err: TextIO, quiet: bool) -> None:
        self._err, self._quiet = err, quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"minicpm: {text}", file=self._err, flush=True)
