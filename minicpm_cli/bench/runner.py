"""Our engine as a runner of workloads: token ids in, token ids out, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from minicpm_cli.bench.speed import Clock, Run
from minicpm_cli.engine.sequence import EngineRequest, TokenEvent
from minicpm_cli.errors import MinicpmError
from minicpm_cli.types import SamplingParams


class Generates(Protocol):
    """What is needed of an Engine."""

    def generate(self, source: Iterable[EngineRequest | None]) -> Iterator[TokenEvent]: ...


class EngineRunner:
    """Our engine, asked by token ids: no text, no stop strings, no end-of-text token."""

    def __init__(self, engine: Generates, clock: Clock = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock

    def run(self, prompts: list[tuple[int, ...]], new: int) -> Run:
        start = self._clock()
        first, count = 0.0, 0
        for event in self._engine.generate(_requests(prompts, new)):
            if event.error is not None:
                raise event.error
            count += event.token is not None
            first = first or self._clock() - start
        total = self._clock() - start
        if count != len(prompts) * new:
            raise MinicpmError(f"the engine gave {count} tokens instead of {len(prompts) * new}; not measured")
        return Run(sum(map(len, prompts)), count, first, total)


def _requests(prompts: list[tuple[int, ...]], new: int) -> Iterator[EngineRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=new)
    for number, prompt in enumerate(prompts):
        yield EngineRequest(id=str(number), prompt=prompt, params=params, seed=0, eos_ids=frozenset())
