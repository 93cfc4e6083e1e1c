"""A batch run: lines -> rows -> LLM.stream (which pulls when it has room) -> journal, with progress beside it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from minicpm_cli.batch.files import write_json
from minicpm_cli.batch.job import Job, open_job, record_model
from minicpm_cli.batch.keys import HashSet, key_hash, row_seed
from minicpm_cli.batch.lines import read_lines
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.order import AsFinished, InOrder
from minicpm_cli.batch.output import Answer, answer_row, error_row
from minicpm_cli.batch.progress import Progress, choose_progress
from minicpm_cli.batch.records import Kind, Row, in_shard, parse
from minicpm_cli.batch.summary import BatchSummary, Counts
from minicpm_cli.errors import Interrupted, MinicpmError, RequestError
from minicpm_cli.llm import LanguageModel
from minicpm_cli.types import Event, Request, SamplingParams


def run_batch(llm_factory: Callable[[], LanguageModel], options: BatchOptions) -> BatchSummary:
    """Runs the rows that OUT does not hold yet. The model is loaded for the first row that needs one, if any does.

    Raises UsageError and FileError before that, Interrupted on Ctrl-C and SIGTERM, and whatever the engine raises;
    finished rows are in OUT in every case. BrokenPipeError says that the reader of a stream has gone.
    """
    progress = choose_progress(options.progress)
    try:
        with _terminable(), open_job(options) as job:
            run = _Run(options, job, progress)
            run.go(llm_factory)
        return run.summarize(interrupted=False)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again to go on.") from None


@dataclass(slots=True)
class _Open:
    """A row that the model is working on."""

    row: Row
    seed: int
    answer: Answer = field(default_factory=Answer)


class _Run:
    def __init__(self, options: BatchOptions, job: Job, progress: Progress) -> None:
        self.counts = Counts(total=None if job.scan is None else job.scan.rows)
        self._options, self._job, self._progress = options, job, progress
        self._out = InOrder(job.output) if options.ordered else AsFinished(job.output)
        self._open: dict[str, _Open] = {}
        self._model = ""
        self._begun = time.monotonic()

    def go(self, llm_factory: Callable[[], LanguageModel]) -> None:
        try:
            with closing(self._pending()) as pending:
                first = next(pending, None)
                if first is not None:
                    self._load_and_answer(llm_factory, first, pending)
        except KeyboardInterrupt:
            self._stopped(interrupted=True)
            raise Interrupted(self._kept()) from None
        except BrokenPipeError:
            raise
        except Exception:
            if self.counts.finished or self._open:
                self._stopped(interrupted=False)
                self._progress.say(self._kept())
            raise

    def summarize(self, *, interrupted: bool) -> BatchSummary:
        """Written to the summary file. Saying it after a whole run is the caller's part (`BatchSummary.lines`)."""
        summary = BatchSummary.of(
            self.counts,
            self._job.past.errors.total(),
            time.monotonic() - self._begun,
            self._job.seed,
            self._options.output,
            interrupted,
        )
        if self._options.summary is not None:
            write_json(Path(self._options.summary), summary.as_json())
        return summary

    def _stopped(self, *, interrupted: bool) -> None:
        """A run that fails keeps its own error, whatever happens to its summary."""
        with suppress(MinicpmError):
            for line in self.summarize(interrupted=interrupted).lines():
                self._progress.say(line)

    def _kept(self) -> str:
        said = f"Stopped after {self.counts.finished:,} rows"
        if self._job.journal is None:
            return f"{said}."
        return f"{said}; they are kept in {self._options.output}. Run the same command again to go on."

    def _load_and_answer(
        self, llm_factory: Callable[[], LanguageModel], first: Row | None, pending: Iterator[Row | None]
    ) -> None:
        with closing(llm_factory()) as llm:
            record_model(self._job, self._options)
            self._model = llm.info.name
            self._begun = time.monotonic()
            self._progress.start()
            try:
                self._answer(llm, first, pending)
            finally:
                self._progress.stop()

    def _answer(self, llm: LanguageModel, first: Row | None, pending: Iterator[Row | None]) -> None:
        base = llm.defaults.checked(self._options.overrides)
        with closing(llm.stream(self._requests(base, first, pending))) as events:
            for event in events:
                self._take(event)
                self._progress.update(self.counts)
        if self._open:
            raise MinicpmError(
                f"The engine ended with {len(self._open)} rows unfinished. They are not in the output; "
                "run the same command again, and please report this."
            )

    # ---- lines in -------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row]:
        """The rows of our shard. An id that a stream repeats makes its line an error row."""
        kind: Kind = "simple"
        seen = HashSet() if self._job.scan is None else None
        size = None if self._job.scan is None else self._job.scan.size
        for line in read_lines(self._job.source, size):
            row = parse(line, self._options.style, kind)
            kind = row.kind
            if seen is not None and row.named:
                row = _first_of_its_id(row, seen)
            if in_shard(line.number, self._options.shard):
                yield row

    def _pending(self) -> Generator[Row | None]:
        """The rows to run; None while the window of --ordered is full. Rows that cannot be run end here."""
        for row in self._rows():
            if any(key_hash(key) in self._job.past.done for key in row.keys):
                self.counts.skipped += 1
                continue
            while self._out.full:
                yield None
            self._out.enter(row.line)
            if row.error is None:
                yield row
            else:
                self._fail(row)

    def _requests(
        self, base: SamplingParams, first: Row | None, pending: Iterator[Row | None]
    ) -> Iterator[Request | None]:
        yield self._request(base, first)
        for row in pending:
            yield self._request(base, row)

    def _request(self, base: SamplingParams, row: Row | None) -> Request | None:
        """Requests are named by their line: an id may be anything, and of any length."""
        if row is None:
            return None
        params = base.checked(row.given)
        seed = row.given.get("seed")
        params = replace(params, seed=row_seed(self._job.seed, row.key) if seed is None else seed)
        name = str(row.line)
        self._open[name] = _Open(row, params.seed or 0)
        return Request(name, row.messages, params)

    # ---- answers out ----------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        open_ = self._open.get(event.id)
        if open_ is None:
            return
        open_.answer.add(event)
        if event.error is not None or event.finish == "error":
            del self._open[event.id]
            self._fail(open_.row.failed(event.error or MinicpmError("the engine gave no reason")))
        elif event.finish in ("stop", "length"):
            del self._open[event.id]
            self._finish(open_)

    def _finish(self, open_: _Open) -> None:
        self._out.leave(open_.row.line, answer_row(open_.row, open_.answer, self._model, open_.seed))
        self.counts.add(open_.answer.usage)

    def _fail(self, row: Row) -> None:
        self._out.leave(row.line, error_row(row))
        self.counts.errors[row.error.code if row.error else "internal"] += 1


def _first_of_its_id(row: Row, seen: HashSet) -> Row:
    """A repeated id must not pass for the first row's: its error row goes by line number."""
    key = key_hash(row.key)
    if key not in seen:
        seen.add(key)
        return row
    error = RequestError("bad_parameter", f"the id {row.id!r} was used by an earlier line")
    return replace(row, id=row.line, named=False).failed(error)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: finished rows are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
