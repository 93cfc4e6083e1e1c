"""A step that repeats the one before is the step that would have been planned and written anew, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, SAMPLED, answers, expected, prompt, request, run_checked
from engine_work import Work, told
from hypothesis import given, settings
from hypothesis import strategies as st
from lagged_cases import lagged_engine

from minicpm_cli.engine.decode_inputs import DecodeHost, DecodeLayout
from minicpm_cli.engine.engine import Engine
from minicpm_cli.engine.lockstep import Continued, Lockstep
from minicpm_cli.engine.pages import PagePool
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import Drawn, Sequence
from minicpm_cli.types import Logprob

LONG = replace(GREEDY, max_tokens=40)


def steps_of(engine: Engine, run: Callable[[Engine], Any]) -> tuple[Any, list[Any], list[bytes], list[bool]]:
    """What a run returns; its steps' chunks, what was sent for each, and whether it was a repetition."""
    chunks, sent, repeated, plan = list[Any](), list[bytes](), list[bool](), engine.scheduler.plan

    def planned() -> Any:
        made = plan()
        chunks.append([(seq.request.id, start, size, sample) for seq, start, size, sample in made.chunks])
        repeated.append(isinstance(made, Continued))
        return made

    engine.scheduler.plan = planned  # type: ignore[method-assign]
    assert engine.runner.pipeline is not None
    for slot in engine.runner.pipeline._slots:
        slot.inputs.fill = written(slot.inputs.fill, sent)  # type: ignore[method-assign]
    return run(engine), chunks, sent, repeated


def written(fill: Callable[..., Any], sent: list[bytes]) -> Callable[..., Any]:
    def filled(*args: Any) -> Any:
        out = fill(*args)
        sent.append(out.numpy().tobytes())
        return out

    return filled


def anew(engine: Engine) -> Engine:
    """Every step is planned anew."""
    engine.scheduler._repetition.begin = lambda *_: None  # type: ignore[method-assign]
    return engine


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(13, 60),
    budget=st.integers(1, 40),
    seats=st.integers(1, 6),
    way=st.sampled_from(["queued", "replayed", "in step"]),
    hosted=st.booleans(),
)
def test_repeated_steps_are_those_planned_anew(
    seed: int, pages: int, budget: int, seats: int, way: str, hosted: bool
) -> None:
    sizes = {"pages": pages, "max_batch_tokens": budget, "max_seqs": seats, "context": 48}
    work = [Work(seed, 10, hosted, most=24) for _ in range(2)]
    one = steps_of(lagged_engine(way, **sizes)[0], lambda engine: told(engine, work[0]))
    other = steps_of(anew(lagged_engine(way, **sizes)[0]), lambda engine: told(engine, work[1]))
    assert one[:3] == other[:3]
    assert not any(other[3])


@pytest.mark.parametrize("way", ["queued", "in step"])
@pytest.mark.parametrize("params", [LONG, replace(SAMPLED, max_tokens=40)], ids=["greedy", "drawn"])
def test_most_steps_of_a_batch_are_repetitions(way: str, params: Any) -> None:
    requests = [request(f"r{i}", prompt(5 + 3 * i, i), params, seed=i) for i in range(8)]
    runs = [lagged_engine(way, max_batch_tokens=200)[0] for _ in range(2)]
    one = steps_of(runs[0], lambda engine: run_checked(engine, requests))
    other = steps_of(anew(runs[1]), lambda engine: run_checked(engine, requests))
    assert one[1:3] == other[1:3]
    assert [event[:5] for event in one[0]] == [event[:5] for event in other[0]]  # all but the times
    assert answers(one[0]) == {r.id: expected(r) for r in requests}
    assert sum(one[3]) == 38  # all but the prompts and the first step after them


def test_a_repetition_that_finds_no_page_is_planned_anew() -> None:
    requests = [request(f"r{i}", prompt(5 + i, i), LONG) for i in range(4)]
    engine, _ = lagged_engine("queued", pages=30)
    events, _, _, repeated = steps_of(engine, lambda engine: run_checked(engine, requests))
    assert answers(events) == {r.id: expected(r) for r in requests}
    assert engine.stats.preemptions > 0
    assert sum(repeated) > 40


def test_sequences_that_say_the_same_share_their_pages() -> None:
    """A page that was sealed before takes the place of a sequence's own: the row that was written is not right then."""
    requests = [request(f"r{i}", prompt(6), LONG) for i in range(5)]
    engine, _ = lagged_engine("queued", max_batch_tokens=200)
    events, _, _, repeated = steps_of(engine, lambda engine: run_checked(engine, requests))
    assert answers(events) == {r.id: expected(r) for r in requests}
    assert engine.stats.peak_pages_held < 5 * 12
    assert sum(repeated) > 20


def test_an_end_token_among_others_ends_its_sequence_alone() -> None:
    answer = expected(request("a", prompt(6), LONG))
    place = next(i for i, token in enumerate(answer) if i > 20 and token not in answer[:i])
    asked = [request("a", prompt(6), LONG, eos_ids=frozenset({answer[place]})), request("b", prompt(9, 1), LONG)]
    engine, _ = lagged_engine("queued")
    events, _, _, repeated = steps_of(engine, lambda engine: run_checked(engine, asked))
    assert [event.finish for event in events if event.id == "a" and event.finish] == ["stop"]
    assert answers(events) == {r.id: expected(r) for r in asked}
    assert sum(repeated) > 30


def test_a_cancel_and_a_newcomer_between_repeated_steps() -> None:
    asked = [request(name, prompt(6 + i, i), LONG) for i, name in enumerate("abc")]
    engine, got = lagged_engine("queued", max_seqs=2)[0], dict[str, list[Any]]()
    for event in engine.generate(iter(asked)):
        engine.scheduler.pool.check()
        got.setdefault(event.id, []).append(event.token)
        if event.id == "a" and len(got["a"]) == 20:
            engine.abort("a")
    whole = {r.id: expected(r) for r in asked}
    assert got["b"] == whole["b"]
    assert got["c"] == whole["c"]
    told_of_a = [token for token in got["a"] if token is not None]
    assert told_of_a == whole["a"][: len(told_of_a)]
    assert len(told_of_a) < 25
    assert got["a"][-1] is None, "told of after its end"


def test_tokens_in_flight_are_the_rows_own_and_others_are_sent() -> None:
    """Whichever way they went before."""
    seqs = [Sequence(request(f"r{i}", prompt(6 + i, i), LONG), 40, 0.0) for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.add_pages(list(range(1 + 20 * i, 13 + 20 * i)))
        seq.planned, seq.row = len(seq.tokens), i
        seq.length = seq.planned + 1
    lockstep, pool = Lockstep(Plan([Chunk(seq, seq.planned - 1, 1, True) for seq in seqs]), 4), PagePool(100, 4)
    layout, penalties = DecodeLayout(8, 12), Penalties(97, torch.device("cpu"), 8)
    host = DecodeHost(layout, 4, penalties, pinned=False)
    for known in (0, 0, 1, 1, 0, 0, 1, 0):
        plan = lockstep.next(pool)
        assert plan is not None
        for seq, place in zip(seqs, lockstep.first, strict=True):
            del seq.tokens[place + plan.number :]
            seq.tokens.extend(range(place + plan.number + known - len(seq.tokens)))
        fresh = DecodeHost(layout, 4, penalties, pinned=False)
        fresh.fill(plan, 4, "greedy")
        host.fill(plan, 4, "greedy")
        got, want = (layout.step(4)[0].host(each.buffer) for each in (host, fresh))
        for name in ("positions", "slots", "kv_len", "source"):
            assert got[name].tolist() == want[name].tolist(), (plan.number, name)
        assert (host.table[:4, 0] == fresh.table[:4, 0]).all()
        if known:
            assert got["ids"].tolist() == want["ids"].tolist()


def test_what_was_drawn_of_some_rows() -> None:
    error, logprob = ValueError("no"), Logprob(8, -1.0, ())
    drawn = Drawn([7, 8, 9], {1: logprob}, {2: error})
    kept = drawn.rows([1, 2])
    assert (kept.tokens, kept.logprobs, kept.errors) == ([8, 9], {0: logprob}, {1: error})
