"""Masks on a device that lags: the forward runs while the masks of its draw are filled, and none comes too late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_cases import GREEDY, SAMPLED, answers, engine_of, expected, prompt, request, run_checked
from engine_work import Thirds
from lagged_cases import WAYS, Queue, lagged_engine

from minicpm_cli.engine.engine import EngineRequest
from minicpm_cli.engine.masks import fill_masks
from minicpm_cli.engine.sequence import Sequence

KINDS = (GREEDY, SAMPLED, replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.2), replace(SAMPLED, logprobs=1))


def crowd() -> list[EngineRequest]:
    """Every third request is free."""
    return [
        request(f"r{i}", prompt(5 + 2 * i, i % 2), KINDS[i % 4], seed=i, mask=Thirds(3 + i) if i % 3 else None)
        for i in range(12)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("budget", "pages"), [(1000, 300), (1, 24), (3, 13)], ids=["roomy", "tight", "least"])
def test_masked_and_free_rows_side_by_side(way: str, budget: int, pages: int) -> None:
    want = answers(run_checked(engine_of()[0], crowd()))
    engine, decoder = lagged_engine(way, pages=pages, max_batch_tokens=budget)
    assert answers(run_checked(engine, crowd())) == want
    assert decoder.largest_step <= budget
    free = [asked for asked in crowd() if asked.mask is None and asked.params.presence_penalty == 0]
    assert {asked.id: want[asked.id] for asked in free} == {asked.id: expected(asked) for asked in free}


@pytest.mark.parametrize("lookup", [0, 4])
def test_drafts_of_free_rows_beside_masked_ones(lookup: int) -> None:
    turns = tuple(range(8)) * 6
    asked = [
        request("free", turns, replace(GREEDY, max_tokens=40)),
        request("masked", prompt(9), replace(GREEDY, max_tokens=40), mask=Thirds()),
    ]
    want = answers(run_checked(engine_of()[0], [replace_mask(each) for each in asked]))
    engine, _ = lagged_engine("queued", lookup=lookup, alike_rows=64)
    assert answers(run_checked(engine, [replace_mask(each) for each in asked])) == want


def replace_mask(asked: EngineRequest) -> EngineRequest:
    return replace(asked, mask=Thirds() if asked.mask else None)


def test_the_mask_of_a_sequence_that_has_ended_in_flight_is_let_be() -> None:
    class Ended(Thirds):
        def fill(self, row: Any) -> None:
            raise AssertionError("asked after its end")

    seqs = [Sequence(request(name, prompt(5), mask=mask), 9, 0.0) for name, mask in (("a", Ended()), ("b", Thirds()))]
    seqs[0].finished = True
    words = np.zeros((2, 4), np.int32)
    assert fill_masks(words, seqs) == {}
    assert words[0].tolist() == [-1] * 4
    assert words[1].tolist() != [-1] * 4


def test_masks_are_filled_while_the_forward_is_on_its_way() -> None:
    queue, waiting = Queue(), list[int]()

    class Watched(Thirds):
        def fill(self, row: Any) -> None:
            super().fill(row)
            waiting.append(len(queue.works))

    engine, _ = lagged_engine("queued")
    assert engine.runner.pipeline is not None
    engine.runner.pipeline.submit = queue.submit
    run_checked(engine, [request("a", prompt(6), mask=Watched())])
    assert waiting == [1] * 12


def test_steps_with_masks_fly() -> None:
    engine, _ = lagged_engine("queued")
    events = engine.generate([request("a", prompt(6), mask=Thirds())])
    assert [engine._flight is not None for event in events if not event.finish] == [True] * 11


class Failing(Thirds):
    def fill(self, row: Any) -> None:
        if self.last:
            raise ValueError("no more")
        super().fill(row)


class Empty(Thirds):
    def fill(self, row: Any) -> None:
        row[:] = 0


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_fails_or_allows_nothing_ends_its_own_request(way: str) -> None:
    other = request("other", prompt(9, 3), SAMPLED)
    engine, _ = lagged_engine(way)
    asked = [request("fails", prompt(6), SAMPLED, mask=Failing()), other, request("none", prompt(7), mask=Empty())]
    events = run_checked(engine, asked)
    errors = {event.id: event.error for event in events if event.error}
    assert errors.keys() == {"fails", "none"}
    assert str(errors["fails"]) == "no more"
    assert getattr(errors["none"], "code", "") == "schema_invalid"
    assert [event.token for event in events if event.id == "other"] == expected(other)
    assert answers(run_checked(engine, [other])) == {"other": expected(other)}
