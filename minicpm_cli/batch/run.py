"""A batch run: lines -> rows -> LLM.stream (which pulls when it has room) -> journal, with progress beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from minicpm_cli.batch.feed import Feed
from minicpm_cli.batch.files import STREAM, is_plain, write_json
from minicpm_cli.batch.job import Job, open_job, record_model
from minicpm_cli.batch.keys import row_seed
from minicpm_cli.batch.logprobs import TokenTexts
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.order import AsFinished, InOrder
from minicpm_cli.batch.output import Answer, answer_row, error_row
from minicpm_cli.batch.process import Interrupts, brisk_threads, terminable
from minicpm_cli.batch.progress import Progress, choose_progress
from minicpm_cli.batch.records import Row
from minicpm_cli.batch.rows import PendingRows
from minicpm_cli.batch.summary import BatchSummary, Counts, Host, count_of
from minicpm_cli.batch.window import Ready, prefix_chain
from minicpm_cli.errors import Interrupted, MinicpmError, RequestError
from minicpm_cli.llm import LanguageModel
from minicpm_cli.types import Event, Request, SamplingParams
from minicpm_cli.units import size

_TAKES_TIME = 50_000_000  # bytes: half a million short lines take some seconds to look through


def run_batch(llm_factory: Callable[[], LanguageModel], options: BatchOptions) -> BatchSummary:
    """Runs the rows that OUT does not hold yet. The model is loaded for the first row that needs one, if any does.

    Raises UsageError and FileError before that, Interrupted on Ctrl-C and SIGTERM, and whatever the engine raises;
    finished rows are in OUT in every case. BrokenPipeError says that the reader of a stream has gone.
    """
    rows_on_screen = options.output == STREAM and sys.stdout is not None and sys.stdout.isatty()
    progress = choose_progress(options.progress, plain=options.plain or rows_on_screen)
    try:
        if is_plain(options.input) and (count := Path(options.input).stat().st_size) > _TAKES_TIME:
            progress.say(f"Checking {options.input} ({size(count)}) ...")
        with terminable() as interrupts, open_job(options) as job:
            run = _Run(options, job, progress, interrupts)
            run.go(llm_factory)
        return run.summarize(interrupted=False)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again to go on.") from None


@dataclass(slots=True)
class _Open:
    """A row that the model is working on; its messages are not needed any more. `chain` until the first token."""

    row: Row
    seed: int
    chain: tuple[int, ...]
    answer: Answer = field(default_factory=Answer)


@contextmanager
def _closed(rows: Generator[Row]) -> Iterator[Generator[Row]]:
    try:
        yield rows
    finally:
        with suppress(ValueError):  # the thread of the feed still waits for a pipe
            rows.close()


class _Run:
    def __init__(self, options: BatchOptions, job: Job, progress: Progress, interrupts: Interrupts) -> None:
        self.counts = Counts(total=None if job.scan is None else job.scan.rows)
        self._options, self._job, self._progress, self._interrupts = options, job, progress, interrupts
        self._out = InOrder(job.output) if options.ordered else AsFinished(job.output)
        self._pending = PendingRows(options, job)
        self._open: dict[str, _Open] = {}
        self._llm: LanguageModel | None = None
        self._host = Host()
        self._begun = time.monotonic()
        self._ended: float | None = None

    def go(self, llm_factory: Callable[[], LanguageModel]) -> None:
        try:
            with _closed(self._pending.read()) as rows:
                first = self._first(rows)
                if first is not None:
                    self._load_and_answer(llm_factory, first, rows)
        except KeyboardInterrupt:
            self._stopped(interrupted=True)
            raise Interrupted(self._kept()) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.counts.finished or self._open:
                self._stopped(interrupted=False)
                self._progress.say(self._kept() + self._advice(error))
            raise

    def summarize(self, *, interrupted: bool) -> BatchSummary:
        """Written to the summary file. Saying it after a whole run is the caller's part (`BatchSummary.lines`)."""
        summary = BatchSummary.of(
            self._look(),
            self._host,
            self._job.past.errors.total(),
            (self._ended or time.monotonic()) - self._begun,
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
        kept = self.counts.finished - self._out.held
        said = f"Stopped after {count_of(kept)}" if kept else "Stopped before a row was finished"
        if self._job.journal is None:
            return f"{said}."
        said += f"; {'it is' if kept == 1 else 'they are'} kept in {self._options.output}." if kept else "."
        if self._out.held:
            said += f" {self._out.held:,} more waited for the rows before them and will be run again."
        return f"{said} Run the same command again to go on."

    def _advice(self, error: Exception) -> str:
        """What nobody foresaw on a GPU is mostly a fault of the GPU: a process that has met it cannot go on."""
        on_gpu = self._host.device is not None and self._host.device.startswith("cuda")
        if not on_gpu or isinstance(error, MinicpmError):
            return ""
        return " With --gpus 1 an engine that fails is begun again by itself."

    def _look(self) -> Counts:
        """The counts of this moment; the progress asks for them from its thread."""
        counts = self.counts
        counts.skipped = self._pending.skipped
        if self._llm is not None:
            totals = self._llm.totals
            counts.seen_prompt_tokens, counts.seen_completion_tokens = totals.prompt_tokens, totals.generated_tokens
        return counts

    def _load_and_answer(self, llm_factory: Callable[[], LanguageModel], first: Row, rows: Generator[Row]) -> None:
        with closing(llm_factory()) as llm:
            record_model(self._job, self._options)
            self._begun, self._llm = time.monotonic(), llm
            self._progress.start(self._look)
            try:
                self._answer(llm, first, rows)
            finally:
                self._ended = time.monotonic()  # what follows, such as the end of other processes, is no one's speed
                self._progress.stop()
                self._look()
                info, self._llm = llm.info, None
                self._host = Host(info.name, info.device, info.load_seconds, llm.gpu_peak_bytes)

    def _answer(self, llm: LanguageModel, first: Row, rows: Generator[Row]) -> None:
        base, name = llm.defaults.checked(self._options.overrides), llm.info.name
        feed = Feed(rows, lambda row: self._ready(llm, base, row), self._out)
        try:
            feed.start(first)
            with brisk_threads(), closing(llm.stream(self._requests(feed))) as events:
                for event in events:
                    self._interrupts.check()
                    self._take(event, name, feed)
        finally:
            feed.stop(patient=self._job.scan is not None)
        if feed.error is not None:
            raise feed.error
        if self._open:
            raise MinicpmError(
                f"The engine ended with {len(self._open)} rows unfinished. They are not in the output; "
                "run the same command again, and please report this."
            )

    # ---- lines in -------------------------------------------------------------------------------------------------

    def _first(self, rows: Iterator[Row]) -> Row | None:
        """The first row that needs a model. Those before it end here."""
        for row in rows:
            self._out.enter(row.line)
            if row.error is None:
                return row
            self._fail(row)
        return None

    def _ready(self, llm: LanguageModel, base: SamplingParams, row: Row) -> Ready | Row:
        """Requests are named by their line: an id may be anything, and of any length."""
        try:
            params = base.checked(row.given)
            seed = row.given.get("seed")
            params = replace(params, seed=row_seed(self._job.seed, row.key) if seed is None else seed)
            asked = Request(str(row.line), row.messages, params, tools=row.tools, tool_choice=row.tool_choice)
            request = llm.encoded(asked)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever one row does to a template, or to a tokenizer: its panic
            return row.failed(error)
        ids = request.ids or ()
        return Ready(replace(row, messages=(), tools=()), request, row.size + 4 * len(ids), prefix_chain(ids))

    def _requests(self, feed: Feed) -> Iterator[Request | None]:
        for item in feed.items(idle=lambda: not self._open):
            if isinstance(item, Row):
                self._fail(item)
                feed.wake()
            elif item is None:
                yield None
            else:
                request = item.request
                self._open[request.id] = _Open(item.row, request.params.seed or 0, item.chain, self._nothing_yet())
                yield request

    def _nothing_yet(self) -> Answer:
        return Answer(texts=TokenTexts(self._llm.token_bytes)) if self._llm is not None else Answer()

    # ---- answers out ----------------------------------------------------------------------------------------------

    def _take(self, event: Event, model: str, feed: Feed) -> None:
        open_ = self._open.get(event.id)
        if open_ is None:
            return
        open_.answer.add(event)
        if open_.chain:
            feed.computed(open_.chain)
            open_.chain = ()
        if event.error is not None or event.finish == "error":
            del self._open[event.id]
            self._fail(open_.row.failed(event.error or MinicpmError("the engine gave no reason")))
        elif event.incomplete:
            del self._open[event.id]
            self._fail(open_.row.failed(_incomplete(open_.answer)))
        elif event.finish not in (None, "cancelled"):
            del self._open[event.id]
            self._out.leave(open_.row.line, answer_row(open_.row, open_.answer, model, open_.seed))
            self.counts.add(open_.answer.usage)
        if event.finish is not None:
            feed.wake()

    def _fail(self, row: Row) -> None:
        self._out.leave(row.line, error_row(row))
        self.counts.errors[row.error.code if row.error else "internal"] += 1


def _incomplete(answer: Answer) -> RequestError:
    count, cut = answer.usage.completion_tokens, answer.finish == "length"
    how = f"was cut at {count} tokens" if cut else f"ended after {count} tokens"
    told = "Raise max_tokens, or ask for less." if cut else "Leave out its stop strings."
    return RequestError(
        "schema_incomplete", f"the answer {how}, before it was what its schema or regex asks for. {told}"
    )
