"""What the bench asks of an engine and how it reads the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from minicpm_cli.bench.runner import EngineRunner, FleetRunner
from minicpm_cli.bench.speed import Run
from minicpm_cli.engine.sequence import EngineRequest, TokenEvent
from minicpm_cli.engine.stats import Stats
from minicpm_cli.errors import MinicpmError, OutOfMemory
from minicpm_cli.types import Event, Request, SamplingParams, Usage


class Clocked:
    """An engine that takes 1 s for the prompts and 0.25 s a step; `short` leaves out that many of the last tokens."""

    def __init__(self, short: int = 0, error: Exception | None = None) -> None:
        self.now, self.short, self.error = 100.0, short, error
        self.requests: list[EngineRequest] = []
        self.stats = Stats(decode_steps=7, decode_host_seconds=3.0)

    def clock(self) -> float:
        return self.now

    def generate(self, source: Iterable[EngineRequest | None]) -> Iterator[TokenEvent]:
        self.requests = [request for request in source if request is not None]
        new = self.requests[0].params.max_tokens or 0
        for step in range(new - self.short):
            self.now += 0.25 if step else 1.0
            self.stats.note_step(2, 0.125, decodes=True)
            self.stats.note_step(9, 4.0)
            yield from (TokenEvent(request.id, 5) for request in self.requests)
        yield TokenEvent("0", None, finish="length", error=self.error)


def greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new)


def test_a_run_counts_tokens_and_seconds() -> None:
    engine = Clocked()
    run = EngineRunner(engine, engine.clock).run([(1, 2, 3), (4, 5, 6)], greedy(5))
    assert run == Run(prompt_tokens=6, new_tokens=10, first_seconds=1.0, total_seconds=2.0, steps=5, host_seconds=0.625)


def test_the_engine_is_asked_for_tokens_that_nothing_ends() -> None:
    engine = Clocked()
    EngineRunner(engine, engine.clock).run([(1, 2), (3, 4)], greedy(3))
    assert [request.prompt for request in engine.requests] == [(1, 2), (3, 4)]
    assert len({request.id for request in engine.requests}) == 2
    for request in engine.requests:
        assert (request.params.temperature, request.params.max_tokens) == (0.0, 3)
        assert (request.eos_ids, request.sink, request.mask) == (frozenset(), None, None)


def test_too_few_tokens_are_no_measurement() -> None:
    engine = Clocked(short=1)
    with pytest.raises(MinicpmError, match="4 tokens instead of 6"):
        EngineRunner(engine, engine.clock).run([(1,), (2,)], greedy(3))


def test_an_engines_error_is_raised() -> None:
    engine = Clocked(error=OutOfMemory("no page left"))
    with pytest.raises(OutOfMemory, match="no page left"):
        EngineRunner(engine, engine.clock).run([(1,)], greedy(3))


class ClockedFleet:
    """Begins each request 1 s after it was asked for; whole answers come 2 s later, `short` of some tokens."""

    def __init__(self, short: int = 0, error: Exception | None = None) -> None:
        self.now, self.short, self.error = 100.0, short, error
        self.requests: list[Request] = []

    def clock(self) -> float:
        return self.now

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Event]:
        self.requests = [request for request in requests if request is not None]
        self.now += 1.0
        yield from (Event(request.id) for request in self.requests)
        self.now += 2.0
        for request in self.requests:
            usage = Usage(len(request.ids or ()), (request.params.max_tokens or 0) - self.short)
            yield Event(request.id, "some text")
            yield Event(request.id, finish="length", usage=usage, error=self.error)


def test_a_fleets_run_counts_tokens_and_seconds() -> None:
    fleet = ClockedFleet()
    run = FleetRunner(fleet, fleet.clock).run([(1, 2, 3), (4, 5, 6)], greedy(5))
    assert run == Run(prompt_tokens=6, new_tokens=10, first_seconds=1.0, total_seconds=3.0)
    assert [request.ids for request in fleet.requests] == [(1, 2, 3), (4, 5, 6)]
    assert len({request.id for request in fleet.requests}) == 2
    assert len({request.params.seed for request in fleet.requests}) == 2
    assert all(request.params.ignore_eos for request in fleet.requests)


def test_what_a_fleet_leaves_out_is_no_measurement() -> None:
    with pytest.raises(MinicpmError, match="9 tokens instead of 10"):
        FleetRunner(ClockedFleet(short=1)).run([(1,)], greedy(10))
    with pytest.raises(OutOfMemory):
        FleetRunner(ClockedFleet(error=OutOfMemory("no room"))).run([(1,)], greedy(10))
