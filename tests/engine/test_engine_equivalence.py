"""However a request is run, alone, batched, in chunks, preempted or on cached pages, it gets the same tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from engine_cases import GREEDY, SAMPLED, answers, engine_of, expected, prompt, request, run_checked
from hypothesis import given, settings
from hypothesis import strategies as st
from lagged_cases import lagged_engine

from minicpm_cli.engine.engine import EngineRequest
from minicpm_cli.types import SamplingParams


@pytest.fixture(autouse=True, params=["plain", "queued", "replayed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here also runs on an engine that lags a step."""
    if request.param != "plain":
        monkeypatch.setitem(globals(), "engine_of", partial(lagged_engine, request.param))
    return str(request.param)


def mixed(count: int) -> list[EngineRequest]:
    """Greedy, plain, filtered and penalised requests; every second one shares a beginning."""
    kinds = (
        GREEDY,
        SAMPLED,
        replace(SAMPLED, top_p=1.0, top_k=0),
        replace(SAMPLED, repetition_penalty=1.0, min_p=0.05, top_k=0),
    )
    return [request(f"r{i}", prompt(5 + 3 * i, i % 2), kinds[i % 4], seed=100 + i) for i in range(count)]


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 64, 1000])
@pytest.mark.parametrize(("pages", "preempts"), [(300, False), (24, True), (12, True)], ids=["roomy", "tight", "least"])
def test_batched_chunked_and_preempted(budget: int, pages: int, preempts: bool) -> None:
    engine, decoder = engine_of(pages=pages, max_batch_tokens=budget)
    requests = mixed(9)
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}
    assert decoder.largest_step <= budget
    if preempts and budget >= 16:
        assert engine.stats.preemptions
    if not preempts:
        assert engine.stats.preemptions == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_alone_at_page_edges(length: int) -> None:
    engine, decoder = engine_of()
    one = request("a", prompt(length))
    assert answers(run_checked(engine, [one])) == {"a": expected(one)}
    assert decoder.steps == 12
    assert decoder.tokens == length + 11


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 17])
def test_the_second_time_all_full_pages_come_from_the_cache(length: int) -> None:
    engine, decoder = engine_of()
    one = request("a", prompt(length), SAMPLED)
    first = run_checked(engine, [one])
    computed = decoder.tokens
    second = run_checked(engine, [one])
    assert answers(first) == answers(second) == {"a": expected(one)}
    usage = second[-1].usage
    assert usage is not None
    assert usage.cached_tokens == (length - 1) // 4 * 4
    assert decoder.tokens - computed == computed - usage.cached_tokens
    assert first[-1].usage is not None
    assert first[-1].usage.cached_tokens == 0


def test_a_conversation_reuses_its_answers() -> None:
    """The next turn's prompt holds the last answer; its pages were sealed while it was generated."""
    engine, _ = engine_of()
    turn = prompt(10)
    one = request("a", turn)
    answer = answers(run_checked(engine, [one]))["a"]
    two = request("b", [*turn, *answer, 3, 1])
    last = run_checked(engine, [two])
    assert answers(last)["b"] == expected(two)
    assert last[-1].usage is not None
    assert last[-1].usage.cached_tokens == 20  # 10 + 11 computed tokens are 5 full pages of 4


def test_an_edited_turn_is_recomputed_from_the_edit_on() -> None:
    engine, _ = engine_of()
    before = list(prompt(20))
    run_checked(engine, [request("a", before)])
    edited = [*before[:9], 96, *before[10:]]
    two = request("b", edited)
    events = run_checked(engine, [two])
    assert answers(events)["b"] == expected(two)
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 8


def test_without_prefix_cache() -> None:
    engine, _ = engine_of(prefix_cache=False, pages=24)
    requests = mixed(6)
    for _ in range(2):
        events = run_checked(engine, requests)
        assert answers(events) == {r.id: expected(r) for r in requests}
    assert engine.stats.cached_tokens == 0


def test_one_page_more_than_the_longest_sequence_needs_is_not_needed() -> None:
    """A pool that holds exactly one request of full length runs any number of them."""
    engine, _ = engine_of(pages=6 + 1, context=400)
    requests = [request(f"r{i}", prompt(12, i)) for i in range(4)]  # 12 + 12 tokens are 6 pages
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}


def test_more_requests_than_seats() -> None:
    engine, decoder = engine_of(max_seqs=2)
    requests = mixed(9)
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}
    assert max(len(lens) for lens in decoder.batches) == 2


def test_the_oldest_is_never_preempted_and_order_is_kept() -> None:
    engine, _ = engine_of(pages=9)
    requests = [request(f"r{i}", prompt(6, i)) for i in range(5)]
    order = [event.id for event in run_checked(engine, requests) if event.finish]
    assert engine.stats.preemptions > 0
    assert order == [r.id for r in requests]


def test_penalties_survive_preemption() -> None:
    params = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=16)
    requests = [request(f"r{i}", prompt(7, i), params, seed=i) for i in range(4)]
    roomy, _ = engine_of()
    tight, _ = engine_of(pages=9)
    alone = [answers(run_checked(engine_of()[0], [r]))[r.id] for r in requests]
    assert list(answers(run_checked(roomy, requests)).values()) == alone
    assert answers(run_checked(tight, requests)) == {r.id: a for r, a in zip(requests, alone, strict=True)}
    assert tight.stats.preemptions > 0


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    max_tokens=st.integers(1, 12),
)
request_strategy = st.tuples(
    st.integers(1, 24), st.integers(0, 2), params_strategy, st.integers(0, 2**64 - 1), st.booleans()
)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(request_strategy, min_size=1, max_size=10),
    pages=st.integers(10, 40),
    budget=st.integers(1, 40),
    seats=st.integers(1, 6),
    size=st.sampled_from([1, 3, 4, 16]),
    aborted=st.sets(st.integers(0, 9), max_size=3),
    idle=st.booleans(),
)
def test_random_workloads(rows, pages, budget, seats, size, aborted, idle) -> None:  # type: ignore[no-untyped-def]
    pages = -(-36 // size) + pages % 7 + 1
    engine, _ = engine_of(pages=pages, page_size=size, max_batch_tokens=budget, max_seqs=seats)
    requests = [
        request(f"r{i}", prompt(length, salt), params, seed, eos_ids=frozenset(range(8) if eos else ()))
        for i, (length, salt, params, seed, eos) in enumerate(rows)
    ]
    got: dict[str, list[int]] = {r.id: [] for r in requests}
    ends: dict[str, str | None] = {}
    for event in engine.generate(r for pair in requests for r in ([None, pair] if idle else [pair])):
        engine.scheduler.pool.check()
        if event.token is not None:
            got[event.id].append(event.token)
        if event.finish:
            ends[event.id] = event.finish
            assert event.usage is not None
            assert event.usage.completion_tokens == len(got[event.id])
        elif int(event.id[1:]) in aborted and len(got[event.id]) == 2:
            engine.abort(event.id)
    assert set(ends) == set(got)
    assert engine.scheduler.pool.held == 0
    for r in requests:
        want = expected(r)
        if ends[r.id] == "cancelled":
            assert got[r.id] == want[: len(got[r.id])]
        else:
            assert got[r.id] == want
            assert ends[r.id] == ("stop" if want[-1] in r.eos_ids else "length")
