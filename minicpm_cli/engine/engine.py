"""The loop: requests are pulled from an iterator while there is room, token events come out.

On a GPU the host lags one step: while it reads, judges and tells the tokens of a step, the next one is running.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol

import torch

from minicpm_cli.engine.graphs import Draw
from minicpm_cli.engine.memory_ledger import Phase
from minicpm_cli.engine.plan import Plan
from minicpm_cli.engine.runner import Flight, Model, Runner, alike_rows
from minicpm_cli.engine.scheduler import Scheduler
from minicpm_cli.engine.sequence import EngineConfig, EngineRequest, TokenEvent
from minicpm_cli.engine.speculation import Price
from minicpm_cli.engine.stats import Stats
from minicpm_cli.errors import OutOfMemory

__all__ = ["Engine", "EngineConfig", "EngineRequest", "TokenEvent"]

WAITING = 16  # requests that are pulled, however long; beyond them no more than fill a step
LOOKAHEAD = 2  # requests in hand beyond the seats, so that a seat is filled in the step in which it falls free
IDLE_SECONDS = 0.001  # pause when nothing runs and the source has nothing right now


class Memory(Protocol):
    """Who watches the memory that steps take."""

    def enter(self, phase: Phase) -> None:
        """What follows is of that phase."""

    def advice(self, tokens: int, seqs: int) -> str:
        """For a step that there was no memory for: what would fit."""


class Engine:
    """Runs requests of token ids on a decoder. One `generate` at a time; the prefix cache outlives it."""

    def __init__(
        self,
        decoder: Model,
        kv: Any,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        draw: Draw | None = None,
    ) -> None:
        self.config, self.stats, self._clock = config, Stats(), clock
        self.runner = Runner(decoder, kv, config, draw)
        self.scheduler = Scheduler(
            config,
            decoder.cfg.vocab,
            self.stats,
            clock,
            host_draws=self.runner.host_draws,
            price=Price.on(decoder.device.type),
            alike_rows=alike_rows(decoder),
        )
        self.memory: Memory | None = None
        self._lag = decoder.device.type != "cpu" if config.lag is None else config.lag
        self._flight: Flight | None = None
        self._since: float | None = None  # since when the device works on the step in flight; None: nobody knows
        self._active: Generator[TokenEvent] | None = None
        self._aborts: deque[str] = deque()
        self._clean = True
        self._source_open = False

    def generate(self, source: Iterable[EngineRequest | None]) -> Generator[TokenEvent]:
        """Events of all requests, each request's in order. Closing the iterator drops what is still running.

        `source` is pulled only while there is room; None means that it has nothing right now. A request that fails
        ends with an event that carries the error; an error of the source itself is raised. Starting another
        `generate` closes the one before.
        """
        if self._active is not None:
            self._active.close()
        self._active = self._serve(iter(source))
        return self._active

    @property
    def looks_up(self) -> bool:
        """Whether tokens that are expected may be verified several in a step."""
        return self.scheduler.speculation is not None

    def abort(self, request_id: str) -> None:
        """Ends the requests with this id, if they were pulled, before the next step; their last event says "cancelled".

        Any thread may call it.
        """
        self._aborts.append(request_id)

    def forget(self) -> None:
        """Empties the prefix cache. Not while `generate` runs."""
        self._reset()
        self.scheduler.pool.forget()

    def _serve(self, source: Iterator[EngineRequest | None]) -> Generator[TokenEvent]:
        self._reset()
        self.runner.settle()
        self._clean, self._source_open = False, True
        try:
            while self._source_open or self.scheduler.live:
                yield from self._pull(source)
                yield from self.scheduler.abort(self._taken_aborts())
                if self._flight and not self._may_fly():
                    yield from self._land()
                yield from self._step()
            self._clean = True
        finally:
            self._reset()

    def _step(self) -> list[TokenEvent]:
        """Plans and launches a step, and commits the one before it; or this one too, if it may not fly.

        If what comes after the tokens in flight may be foreseen, those are taken in first, and told after the launch.
        """
        started, waited = self._clock(), self.stats.wait_seconds
        if self._flight is None:
            self._since = started
        events = self._land() if self._flight and self._foresees(self._flight) else []
        plan = self.scheduler.plan()
        if not plan.rows:
            return events or (self._land() if self._flight else self._pause())
        phase = self._phase(plan)
        if self.memory is not None:
            self.memory.enter(phase)
        try:
            flight = self.runner.launch(plan)
        except (RuntimeError, MemoryError) as error:
            return [*events, *self._land(), *self._out_of_memory(plan, error)]
        events += self._land()
        if plan.masked:
            try:
                self.runner.complete(flight)
            except (RuntimeError, MemoryError) as error:
                return [*events, *self._out_of_memory(plan, error)]
        self._flight = flight
        if phase == "capture":
            self._since = None
        if not self._may_fly():
            events += self._land()
        waited, seconds = self.stats.wait_seconds - waited, self._clock() - started
        self.stats.note_step(plan.tokens, seconds - waited, decodes=plan.decodes)
        return events

    def _phase(self, plan: Plan) -> Phase:
        if not plan.decodes:
            return "prefill"
        return "capture" if self.runner.captures(plan) else "decode"

    def _may_fly(self) -> bool:
        """Whether the step in flight may stay there while the tokens before it are told.

        Not if a request needs the host between its steps, nor if a capture would keep the tokens in flight waiting.
        """
        if not self._lag or self.scheduler.hosted:
            return False
        return self.scheduler.repeats or self.runner.ready(self.scheduler.running)

    def _foresees(self, flight: Flight) -> bool:
        """Whether the next step's rows depend on what the one in flight draws."""
        return flight.plan.extra > 0 or self.scheduler.speculates

    def _land(self) -> list[TokenEvent]:
        """Waits for the step in flight, and takes in what it drew."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        started = self._clock()
        flight.wait()
        landed = self._clock()
        self.stats.wait_seconds += landed - started
        if self._since is not None:
            self.scheduler.timed(flight.plan, landed - self._since)
        self._since = landed
        return self.scheduler.commit(flight.plan, flight.draws())

    def _pull(self, source: Iterator[EngineRequest | None]) -> Iterator[TokenEvent]:
        """Fills the hand from the source as far as the next step has use for it; yields the refusals.

        A source may take its time for each, and steps in flight compute meanwhile what came before.
        """
        scheduler, most = self.scheduler, self.config.max_batch_tokens
        while self._source_open and scheduler.live < self.config.max_seqs + LOOKAHEAD:
            if len(scheduler.waiting) >= WAITING and scheduler.backlog >= most:
                return
            try:
                request = next(source)
            except StopIteration:
                self._source_open = False
                return
            if request is None:
                return
            refusal = scheduler.add(request)
            if refusal:
                yield refusal

    def _pause(self) -> list[TokenEvent]:
        assert not self.scheduler.live, "requests are waiting, and none of them can run"
        if self._source_open:
            time.sleep(IDLE_SECONDS)
        return []

    def _out_of_memory(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        """Ends the requests of a step that the device had no memory for. Any other error goes on its way."""
        if not _is_out_of_memory(error):
            raise error
        self.runner.settle()  # what was launched of it still reads its inputs
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
        seqs = [seq for seq in dict.fromkeys(chunk.seq for chunk in plan.chunks) if not seq.finished]
        advice = "Lower --max-seqs, --ctx or --memory-fraction, or close other programs that use the device."
        if self.memory is not None:
            advice = self.memory.advice(plan.tokens, len(seqs))
        reason = OutOfMemory(f"out of memory in a step of {plan.tokens} tokens for {len(seqs)} requests. {advice}")
        reason.__cause__ = error.with_traceback(None)
        return self.scheduler.fail(seqs, reason)

    def _taken_aborts(self) -> set[str]:
        taken = set()
        while self._aborts:
            taken.add(self._aborts.popleft())
        return taken

    def _reset(self) -> None:
        """After an interrupt, an error or a close: no request lives on, no page is held."""
        self._flight = None
        if not self._clean:
            self.scheduler.reset()
            self.runner.reset()
        self._aborts.clear()
        self._clean = True


def _is_out_of_memory(error: Exception) -> bool:
    """torch raises its own class for CUDA and a plain RuntimeError for the CPU's allocator.

    A capture that ran out of memory fails with another error at its end.
    """
    if isinstance(error.__context__, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
