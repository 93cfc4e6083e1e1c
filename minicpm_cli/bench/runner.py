"""Our engine, or several of them, as a runner of workloads: token ids in, tokens out, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from minicpm_cli.bench.speed import Clock, Run
from minicpm_cli.engine.sequence import EngineRequest, TokenEvent
from minicpm_cli.engine.stats import Stats
from minicpm_cli.errors import MinicpmError
from minicpm_cli.types import Event, Request, SamplingParams


class Generates(Protocol):
    """What is needed of an Engine."""

    stats: Stats

    def generate(self, source: Iterable[EngineRequest | None]) -> Iterator[TokenEvent]: ...


class EngineRunner:
    """Our engine, asked by token ids: no text, no stop strings, no end-of-text token."""

    def __init__(self, engine: Generates, clock: Clock = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock

    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        steps, host = self._worked()
        start = self._clock()
        first, count = 0.0, 0
        for event in self._engine.generate(_requests(prompts, params)):
            if event.error is not None:
                raise event.error
            count += event.token is not None
            first = first or self._clock() - start
        total = self._clock() - start
        _check(count, len(prompts) * (params.max_tokens or 0))
        more_steps, more_host = self._worked()
        worked = more_host - host if host is not None and more_host is not None else None
        return Run(sum(map(len, prompts)), count, first, total, more_steps - steps, worked)

    def _worked(self) -> tuple[int, float | None]:
        stats = self._engine.stats
        return stats.decode_steps, getattr(stats, "decode_host_seconds", None)


def _requests(prompts: list[tuple[int, ...]], params: SamplingParams) -> Iterator[EngineRequest]:
    for number, prompt in enumerate(prompts):
        yield EngineRequest(id=str(number), prompt=prompt, params=params, seed=number, eos_ids=frozenset())


class Streams(Protocol):
    """What is needed of a Fleet."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Event]: ...


class FleetRunner:
    """Engines in processes of their own, which tell an answer as text when it is whole, as those of `batch` do."""

    def __init__(self, fleet: Streams, clock: Clock = time.perf_counter) -> None:
        self._fleet, self._clock = fleet, clock

    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        start = self._clock()
        first, count = 0.0, 0
        for event in self._fleet.stream(_encoded(prompts, params)):
            if event.error is not None:
                raise event.error
            count += event.usage.completion_tokens if event.usage else 0
            first = first or self._clock() - start
        total = self._clock() - start
        _check(count, len(prompts) * (params.max_tokens or 0))
        return Run(sum(map(len, prompts)), count, first, total)


def _encoded(prompts: list[tuple[int, ...]], params: SamplingParams) -> Iterator[Request]:
    for number, prompt in enumerate(prompts):
        yield Request(str(number), "", replace(params, seed=number, ignore_eos=True), ids=prompt)


def _check(count: int, expected: int) -> None:
    if count != expected:
        raise MinicpmError(f"the engine gave {count} tokens instead of {expected}; not measured")
