"""Random work for an engine: prompts that share beginnings, every kind of request, ends and cancels of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_cases import prompt

from minicpm_cli.engine.engine import Engine, EngineRequest, TokenEvent
from minicpm_cli.types import SamplingParams

Told = list[tuple[int | None, str | None]]


class Stop:
    """A sink that ends its request at the token after `count` others, or never."""

    def __init__(self, count: int) -> None:
        self.left = count

    def push(self, token: int) -> Any:
        self.left -= 1
        return "stop" if self.left == 0 else None


class Odd:
    """A mask of the odd tokens."""

    def fill(self, row: Any) -> None:
        row[:] = -1431655766  # bits 1, 3, 5, ...

    def accept(self, token: int) -> None:
        pass


class Thirds:
    """A mask that depends on the token before: the next one leaves another rest modulo 3. It may end the answer."""

    def __init__(self, most: int = 1000) -> None:
        self.last, self.left = 0, most

    def fill(self, row: Any) -> None:
        tokens = np.arange(32 * len(row))
        row[:] = np.packbits(tokens % 3 == (self.last + 1) % 3, bitorder="little").view(np.int32)

    def accept(self, token: int) -> Any:
        assert token % 3 == (self.last + 1) % 3, "drawn before its mask was there"
        self.last, self.left = token, self.left - 1
        return "stop" if self.left == 0 else None


@dataclass
class Work:
    """The requests of a seed, made anew at every call, and when each is cancelled: after so many tokens, or never."""

    seed: int
    count: int
    hosted: bool = True
    longest: int = 24
    most: int = 12
    cancels: dict[str, int] = field(default_factory=dict)

    def requests(self) -> Iterator[EngineRequest | None]:
        draw = random.Random(self.seed)
        for number in range(self.count):
            while draw.random() < 0.1:
                yield None
            yield self._request(f"r{number}", draw)

    def _request(self, name: str, draw: random.Random) -> EngineRequest:
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.0, 0.7, 1.5]),
            top_p=draw.choice([1.0, 0.9, 0.3]),
            top_k=draw.choice([0, 0, 1, 5]),
            min_p=draw.choice([0.0, 0.1]),
            presence_penalty=draw.choice([0.0, 0.7]) if self.hosted and draw.random() < 0.2 else 0.0,
            logprobs=2 if self.hosted and draw.random() < 0.05 else None,
            max_tokens=draw.randint(1, self.most),
        )
        if draw.random() < 0.15:
            self.cancels[name] = draw.randint(1, 5)
        eos = frozenset(range(8)) if draw.random() < 0.5 else frozenset()
        sink = Stop(draw.randint(1, 6)) if draw.random() < 0.3 else None
        mask = Thirds(draw.randint(1, 9)) if self.hosted and draw.random() < 0.15 else None
        tokens = prompt(draw.randint(1, self.longest), draw.randint(0, 3))
        return EngineRequest(name, tokens, params, draw.getrandbits(64), eos, sink, mask)


def told(engine: Engine, work: Work) -> dict[str, Told]:
    """What each request is told, token by token; the pool is checked after every step."""
    commit, events = engine.scheduler.commit, dict[str, list[TokenEvent]]()

    def checked(*args: Any) -> list[TokenEvent]:
        committed = commit(*args)
        engine.scheduler.pool.check()
        return committed

    engine.scheduler.commit = checked  # type: ignore[method-assign]
    for event in engine.generate(work.requests()):
        assert event.error is None, event.error
        mine = events.setdefault(event.id, [])
        mine.append(event)
        if len(mine) == work.cancels.get(event.id):
            engine.abort(event.id)
    assert engine.scheduler.live == 0
    assert engine.scheduler.pool.held == 0
    del engine.scheduler.commit  # type: ignore[method-assign]
    assert len(events) == work.count
    for mine in events.values():
        assert [e.finish for e in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].usage is not None
        assert mine[-1].usage.completion_tokens == sum(e.token is not None for e in mine)
    return {name: [(e.token, e.finish) for e in mine] for name, mine in events.items()}


def same(one: dict[str, Told], other: dict[str, Told]) -> bool:
    """Equal, but that a cancel may come a token sooner or later."""
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Told, other: Told) -> bool:
    if one[-1][1] == other[-1][1] != "cancelled":
        return one == other
    shorter = min(len(one), len(other)) - 1
    return "cancelled" in (one[-1][1], other[-1][1]) and one[:shorter] == other[:shorter]
