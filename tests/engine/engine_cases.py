"""Engines over the fake decoder, requests, and what they must answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from fake_decoder import VOCAB, FakeDecoder, reference

from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest, TokenEvent
from minicpm_cli.engine.sampler import Rows, sample
from minicpm_cli.types import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=12)


def engine_of(pages: int = 200, page_size: int = 4, **options: Any) -> tuple[Engine, FakeDecoder]:
    decoder = FakeDecoder(pages, page_size)
    sizes = {"max_seqs": 8, "max_batch_tokens": 64, "context": 400} | options
    return Engine(decoder, None, EngineConfig(pages=pages, page_size=page_size, **sizes)), decoder


def request(
    name: str, prompt: Iterable[int], params: SamplingParams = GREEDY, seed: int = 5, **more: Any
) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), params, seed, **more)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * i + 3 * i) % VOCAB for i in range(length))


def expected(req: EngineRequest) -> list[int]:
    """The answer, one token at a time from the plain history."""
    history, answer = list(req.prompt), []
    for index in range(req.params.max_tokens or 0):
        rows = Rows.of([req.params], [req.seed], [index], torch.device("cpu"))
        token = int(sample(reference(history)[None], rows).ids)
        answer.append(token)
        history.append(token)
        if token in req.eos_ids:
            break
    return answer


def answers(events: Iterable[TokenEvent]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for event in events:
        assert event.error is None, event.error
        out.setdefault(event.id, [])
        if event.token is not None:
            out[event.id].append(event.token)
    return out


def run_checked(engine: Engine, source: Iterable[EngineRequest | None]) -> list[TokenEvent]:
    """All events, with the pool checked at each one, and nothing left behind."""
    events = []
    for event in engine.generate(source):
        engine.scheduler.pool.check()
        events.append(event)
    assert_empty(engine)
    return events


def assert_empty(engine: Engine) -> None:
    engine.scheduler.pool.check()
    assert engine.scheduler.live == 0
    assert engine.scheduler.pool.held == 0
