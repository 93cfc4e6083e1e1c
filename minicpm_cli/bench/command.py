"""`minicpm bench`: opens what is to be measured once, runs the workloads, gives rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from minicpm_cli.bench.rows import STEADY, Row, place
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.speed import WORKLOADS, Runner, Workload, measure
from minicpm_cli.bench.start import STARTS, measure_start
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from minicpm_cli.bench.subject import Subject

CHOICES = (*WORKLOADS, *STARTS)
USUAL = tuple(WORKLOADS)
PEERS = ("transformers",)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`shape` measures random weights in the place of the model of `load`; no `workloads` means the usual ones.

    `against` repeats the workloads with another engine in the same process.
    """

    load: LoadOptions
    shape: str | None = None
    workloads: tuple[str, ...] = ()
    repeats: int = 3
    against: str | None = None
    json: bool = False

    def checked(self) -> BenchOptions:
        """Itself. Raises UsageError before anything is loaded."""
        for name in self.workloads:
            if name not in CHOICES:
                raise UsageError(f"no workload is called {name!r}; choose from: {', '.join(CHOICES)}")
        if self.against not in (None, *PEERS):
            raise UsageError(f"--against {self.against!r} is not known; choose from: {', '.join(PEERS)}")
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}; it must be at least 1")
        if self.shape is not None:
            raw_config(self.shape)
        if self.shape and set(self.workloads) & set(STARTS):
            raise UsageError(f"{', '.join(STARTS)} time whole processes of a real model; give -m MODEL, not --shape")
        return self

    @property
    def speeds(self) -> list[Workload]:
        return [WORKLOADS[name] for name in self.workloads or USUAL if name in WORKLOADS]

    @property
    def load_flags(self) -> list[str]:
        """What a process of its own must be told to load the model so."""
        load, flags = self.load, list[str]()
        if load.quantize:
            flags += ["--quantize", load.quantize]
        if load.gptq_format:
            flags += ["--gptq-format", load.gptq_format]
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
            print(unsteady(row), file=err, flush=True)
        rows.append(row)
    return rows


def unsteady(row: Row) -> str:
    """What to say of runs that are not worth comparing."""
    return (
        f"{row.workload}: the runs differ by {row.spread:.0%}, so something else keeps this machine busy. "
        "Measure again when it is quiet."
    )


def line(row: Row) -> str:
    """A row for reading: `decode  61.2 tok/s  (60.8 to 61.9, 3 runs)  demo Q4_1 minicpm-cli on CPU, 2 threads`."""
    spread = f"({min(row.runs):.4g} to {max(row.runs):.4g}, {len(row.runs)} runs)"
    what = f"{row.setting.model} {row.setting.scheme} {row.setting.engine} on {place(row.setting)}"
    return f"{row.workload:<12}{row.value:>10.4g} {row.unit:<6} {spread:<28} {what}"


def _measure(options: BenchOptions, settings: Settings, err: TextIO) -> Iterator[Row]:
    from minicpm_cli.bench.subject import open_subject

    say = _Notes(err, settings.quiet)
    subject = open_subject(options.load, options.shape, settings)
    for name in options.starts:
        say(f"{name}: {STARTS[name][1]}")
        yield Row(
            subject.setting(), name, measure_start(name, options.load.model, options.repeats, options.load_flags), "s"
        )
    if options.speeds:
        yield from _speeds("ours", options, subject, say)
        if options.against:
            yield from _speeds(options.against, options, subject, say)


def _speeds(engine: str, options: BenchOptions, subject: Subject, say: _Notes) -> Iterator[Row]:
    """The rows of one engine; its model is freed at the end, before the next one is loaded."""
    say(f"loading {subject.name} for {engine}")
    ours = engine == "ours"
    runner: Runner = subject.runner(options.speeds) if ours else subject.peer_runner()
    setting = subject.setting() if ours else subject.peer_setting(engine)
    for workload in options.speeds:
        say(f"{workload.name}: {workload.help}")
        runs = measure(runner, workload, vocab=subject.cfg.vocab, repeats=options.repeats)
        yield Row(setting, workload.name, runs, workload.unit)


class _Notes:
    """What is going on, for whoever waits."""

    def __init__(self, err: TextIO, quiet: bool) -> None:
        self._err, self._quiet = err, quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._err, flush=True)
