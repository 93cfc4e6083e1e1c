"""Ends of every kind: stops, limits, errors, aborts, closes, interrupts; nothing of one request reaches another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, SAMPLED, answers, assert_empty, engine_of, expected, prompt, request, run_checked
from fake_decoder import VOCAB
from lagged_cases import lagged_engine

from minicpm_cli.engine.engine import LOOKAHEAD, EngineConfig, EngineRequest, TokenEvent
from minicpm_cli.errors import ContextOverflow, OutOfMemory, RequestError


@pytest.fixture(autouse=True, params=["plain", "lagged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here also runs on an engine that lags a step."""
    if request.param != "plain":
        monkeypatch.setitem(globals(), "engine_of", partial(lagged_engine, request.param))
    return str(request.param)


class Sink:
    """Ends after so many tokens, or raises."""

    def __init__(self, stop_after: int = 1000, error: Exception | None = None) -> None:
        self.got: list[int] = []
        self.stop_after, self.error = stop_after, error

    def push(self, token: int) -> Any:
        self.got.append(token)
        if len(self.got) < self.stop_after:
            return None
        if self.error:
            raise self.error
        return "stop"


class Mask:
    """Allows `allowed` only."""

    def __init__(self, allowed: set[int], error: Exception | None = None) -> None:
        self.allowed, self.error, self.accepted = allowed, error, []

    def fill(self, row: Any) -> None:
        if self.error:
            raise self.error
        row[:] = 0
        for token in self.allowed:
            row[token // 32] |= -(2**31) if token % 32 == 31 else 1 << token % 32

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class Ending(Mask):
    """Ends the answer with its third token."""

    def accept(self, token: int) -> Any:
        super().accept(token)
        return "stop" if len(self.accepted) == 3 else None


def last(events: list[TokenEvent], name: str) -> TokenEvent:
    mine = [event for event in events if event.id == name]
    assert [event for event in mine if event.finish] == mine[-1:], "one last event, and it is the last"
    return mine[-1]


OTHER = request("other", prompt(9, 3), SAMPLED)


def assert_other_is_well(events: list[TokenEvent]) -> None:
    assert [e.token for e in events if e.id == "other"] == expected(OTHER)


@pytest.mark.parametrize("other", ["smaller", "larger"])
def test_end_token_is_told_but_not_pushed(other: str) -> None:
    """Any of several ends the answer."""
    answer = expected(request("a", prompt(6)))
    place = next(i for i, token in enumerate(answer) if i > 2 and token not in answer[:i])
    another = min(set(range(answer[place])) - set(answer)) if other == "smaller" else 500
    sink = Sink()
    engine, _ = engine_of()
    ends = frozenset({answer[place], another})
    events = run_checked(engine, [request("a", prompt(6), eos_ids=ends, sink=sink), OTHER])
    assert last(events, "a").finish == "stop"
    assert last(events, "a").token == answer[place]
    assert sink.got == answer[:place]
    assert last(events, "a").usage.completion_tokens == place + 1
    assert_other_is_well(events)


def test_sink_ends_a_request() -> None:
    sink = Sink(stop_after=4)
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6), sink=sink), OTHER])
    assert last(events, "a").finish == "stop"
    assert sink.got == expected(request("a", prompt(6)))[:4]
    assert_other_is_well(events)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_length(tokens: int) -> None:
    engine, decoder = engine_of()
    sink = Sink()
    events = run_checked(engine, [request("a", prompt(6), replace(GREEDY, max_tokens=tokens), sink=sink)])
    end = last(events, "a")
    assert (end.finish, len(sink.got), decoder.steps) == ("length", tokens, tokens)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (6, tokens)
    assert end.timings.queued_seconds <= end.timings.first_token_seconds <= end.timings.total_seconds
    assert tokens == 1 or end.timings.first_token_seconds < end.timings.total_seconds


def test_stop_on_the_last_allowed_token_is_a_stop() -> None:
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6), replace(GREEDY, max_tokens=3), sink=Sink(stop_after=3))])
    assert last(events, "a").finish == "stop"


def test_no_limit_means_what_is_left_of_the_context() -> None:
    engine, _ = engine_of(context=30)
    events = run_checked(engine, [request("a", prompt(6), replace(GREEDY, max_tokens=None))])
    assert last(events, "a").usage.completion_tokens == 24
    assert last(events, "a").finish == "length"


def test_no_limit_in_a_small_pool_means_what_is_left_of_the_pool() -> None:
    engine, _ = engine_of(pages=6)
    events = run_checked(
        engine, [request("a", prompt(6), replace(GREEDY, max_tokens=None)), OTHER.__class__("b", prompt(3), GREEDY, 1)]
    )
    assert last(events, "a").usage.completion_tokens == 14


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request("bad", prompt(25)), ContextOverflow, "prompt 25 \\+ max_new 12 > ctx 30"),
        (
            request("bad", prompt(30), replace(GREEDY, max_tokens=None)),
            ContextOverflow,
            "prompt 30 \\+ max_new 1 > ctx 30",
        ),
        (request("bad", ()), RequestError, "prompt is empty"),
        (request("bad", (1, VOCAB)), RequestError, "outside 0..96"),
        (request("bad", (-1,)), RequestError, "outside 0..96"),
        (request("bad", (2**40,)), RequestError, "outside 0..96"),
    ],
)
def test_what_can_never_run_is_refused_and_the_others_go_on(
    bad: EngineRequest, error: type[Exception], words: str
) -> None:
    engine, _ = engine_of(context=30)
    events = run_checked(engine, [OTHER, bad, request("third", prompt(3))])
    end = last(events, "bad")
    assert (end.finish, end.token) == ("error", None)
    with pytest.raises(error, match=words):
        raise end.error  # type: ignore[misc]
    assert_other_is_well(events)
    assert last(events, "third").finish == "length"
    assert (engine.stats.requests, engine.stats.failed, engine.stats.finished) == (3, 1, 2)


def test_empty_prompt_has_its_code() -> None:
    engine, _ = engine_of()
    assert last(run_checked(engine, [request("a", ())]), "a").error.code == "missing_prompt"


def test_more_than_all_pages_is_refused_with_numbers() -> None:
    engine, _ = engine_of(pages=6)
    end = last(run_checked(engine, [request("a", prompt(10)), request("b", prompt(8))]), "a")
    assert isinstance(end.error, ContextOverflow)
    assert (end.error.prompt_tokens, end.error.max_tokens, end.error.context) == (10, 12, 20)


def test_an_error_of_a_sink_ends_only_its_request() -> None:
    boom = ValueError("boom")
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6), sink=Sink(3, boom)), OTHER])
    assert last(events, "a").error is boom
    assert last(events, "a").finish == "error"
    assert_other_is_well(events)


def test_an_error_of_a_mask_ends_only_its_request() -> None:
    boom = ValueError("boom")
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6), mask=Mask({1}, boom)), OTHER])
    assert last(events, "a").error is boom
    assert_other_is_well(events)


def test_a_mask_restrains_the_draw_and_hears_of_it() -> None:
    allowed = {0, 31, 32, 63, 95, 96}
    mask = Mask(allowed)
    engine, _ = engine_of()
    events = run_checked(
        engine, [request("a", prompt(6), replace(SAMPLED, max_tokens=30, temperature=5.0, top_k=0), mask=mask), OTHER]
    )
    got = [e.token for e in events if e.id == "a"]
    assert set(got) == allowed
    assert mask.accepted == got  # also of the last one: it may be what completes the answer
    assert_other_is_well(events)


def test_a_mask_may_end_the_answer_also_where_the_limit_would() -> None:
    for limit in (3, 10):
        engine, _ = engine_of()
        events = run_checked(
            engine, [request("a", prompt(6), replace(GREEDY, max_tokens=limit), mask=Ending({5})), OTHER]
        )
        assert [e.token for e in events if e.id == "a"] == [5, 5, 5]
        assert last(events, "a").finish == "stop"
        assert_other_is_well(events)


def test_a_mask_that_allows_nothing_is_an_error_of_the_schema() -> None:
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6), mask=Mask(set())), OTHER])
    assert last(events, "a").error.code == "schema_invalid"
    assert_other_is_well(events)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=0, top_p=1.0)])
def test_scores_that_are_not_finite_end_only_their_request(value: float, params: Any) -> None:
    engine, decoder = engine_of()
    start = list(prompt(6, 1))

    def spoil(history: list[int], logits: torch.Tensor) -> torch.Tensor:
        if history[:6] == start and len(history) == 9:
            logits = logits.clone()
            logits[50] = value
        return logits

    decoder.spoil = spoil
    events = run_checked(engine, [request("a", start, params), OTHER])
    assert "float16" in str(last(events, "a").error)
    assert len([e for e in events if e.id == "a"]) == 4
    assert_other_is_well(events)


def test_abort_between_events() -> None:
    engine, _ = engine_of()
    events = []
    for event in engine.generate(
        [request("a", prompt(6)), OTHER, request("same", prompt(3)), request("same", prompt(4))]
    ):
        events.append(event)
        if len(events) == 9:
            engine.abort("a")
            engine.abort("same")
            engine.abort("nobody")
    assert last(events, "a").finish == "cancelled"
    assert last(events, "a").usage.completion_tokens == 3
    assert [e.finish for e in events if e.id == "same"].count("cancelled") == 2
    assert_other_is_well(events)
    assert engine.stats.cancelled == 3
    assert_empty(engine)


def test_abort_of_one_that_waits() -> None:
    engine, _ = engine_of(max_seqs=1)
    events = []
    for event in engine.generate([OTHER, request("a", prompt(6))]):
        events.append(event)
        if len(events) == 1:
            engine.abort("a")
    assert last(events, "a").finish == "cancelled"
    assert last(events, "a").usage.completion_tokens == 0
    assert_other_is_well(events)


def test_duplicate_ids_both_run() -> None:
    engine, _ = engine_of()
    events = run_checked(engine, [request("a", prompt(6)), request("a", prompt(6, 1))])
    assert len([e for e in events if e.finish == "length"]) == 2


@pytest.mark.parametrize("after", [0, 1, 5, 30])
def test_closing_frees_all_pages_and_keeps_the_cache_right(after: int) -> None:
    engine, _ = engine_of(pages=40)
    requests = [request(f"r{i}", prompt(9 + i, i % 2)) for i in range(6)]
    stream = engine.generate(iter(requests))
    for _ in range(after):
        next(stream)
    stream.close()
    assert_empty(engine)
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}


def test_a_new_generate_closes_the_one_before() -> None:
    engine, _ = engine_of()
    stream = engine.generate([request("a", prompt(6))])
    next(stream)
    assert answers(run_checked(engine, [OTHER])) == {"other": expected(OTHER)}
    assert list(stream) == []


@pytest.mark.parametrize("where", ["forward", "sample", "seal", "drop", "take", "sink", "source", "evict"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_ctrl_c_anywhere_leaves_a_working_engine(where: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, decoder = engine_of(pages=17)
    requests = [request(f"r{i}", prompt(9 + i, i % 2), SAMPLED) for i in range(6)]
    calls = 0

    def interrupting(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                if calls % 2:
                    function(*args, **options)  # the work is done, its caller never hears of it
                raise KeyboardInterrupt
            return function(*args, **options)

        return call

    pool = engine.scheduler.pool
    run_checked(engine, requests[:2])  # the cache is not empty
    source: Any = iter(requests)
    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(engine.runner.forward, "step", interrupting(decoder.forward))
        elif where == "sample":
            pipeline = engine.runner.pipeline
            owner, name = (pipeline.draw, "draw") if pipeline else (engine.runner, "sample")
            patch.setattr(owner, name, interrupting(getattr(owner, name)))
        elif where == "sink":
            sink = Sink()
            sink.push = interrupting(sink.push)  # type: ignore[method-assign]
            source = iter([replace_sink(r, sink) for r in requests])
        elif where == "source":
            pull = interrupting(lambda: next(iterator))
            iterator = iter(requests)
            source = iter(pull, None)
        else:
            name = "_evict" if where == "evict" else where
            patch.setattr(pool, name, interrupting(getattr(pool, name)))
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(source))
    assert_empty(engine)
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}


def replace_sink(req: EngineRequest, sink: Sink) -> EngineRequest:
    return EngineRequest(req.id, req.prompt, req.params, req.seed, req.eos_ids, sink)


def test_an_interrupted_prefill_is_not_in_the_cache(way: str) -> None:
    engine, decoder = engine_of(max_batch_tokens=4)

    def interrupt(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    decoder.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate([request("a", prompt(20))]))
    assert_empty(engine)
    known = 2 if way == "plain" else 1  # chunks of a page that were computed, as far as the host knows
    assert engine.scheduler.pool.idle == known
    decoder.before_step = None
    end = run_checked(engine, [request("a", prompt(20))])
    assert answers(end) == {"a": expected(request("a", prompt(20)))}
    assert end[-1].usage.cached_tokens == 4 * known


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_in_a_step_ends_what_it_ran(error: Exception, way: str) -> None:
    engine, decoder = engine_of(max_seqs=2)
    fourth = 3 if way == "plain" else 4  # there each of the two prompts runs for itself

    def fail(step: int) -> None:
        if step == fourth:
            raise error

    decoder.before_step = fail
    events = run_checked(engine, [request("a", prompt(6)), request("b", prompt(7)), OTHER, request("d", prompt(5))])
    for name in "ab":
        assert isinstance(last(events, name).error, OutOfMemory)
        assert last(events, name).usage.completion_tokens == 3
    assert_other_is_well(events)
    assert last(events, "d").finish == "length"


def test_a_step_without_memory_is_over_before_the_next_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a part of it may have been launched, and its inputs are not read yet."""
    engine, _ = engine_of(max_seqs=2)
    launch, settle, seen = engine.runner.launch, engine.runner.settle, list[str]()

    def failing(plan: Any) -> Any:
        seen.append("launch")
        if len(seen) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", failing)
    monkeypatch.setattr(engine.runner, "settle", lambda: (seen.append("settle"), settle()))
    run_checked(engine, [request("a", prompt(6)), request("b", prompt(7)), OTHER])
    assert seen[:6] == ["settle", *["launch"] * 3, "settle", "launch"]


def test_any_other_error_of_the_model_is_raised_and_the_engine_stays_usable() -> None:
    engine, decoder = engine_of()

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("device-side assert")

    decoder.before_step = fail
    with pytest.raises(RuntimeError, match="device-side"):
        list(engine.generate([OTHER]))
    assert_empty(engine)
    decoder.before_step = None
    assert answers(run_checked(engine, [OTHER])) == {"other": expected(OTHER)}


def test_an_error_of_the_source_is_raised_after_freeing() -> None:
    def source() -> Iterator[EngineRequest]:
        yield OTHER
        raise OSError("disk")

    engine, _ = engine_of()
    with pytest.raises(OSError, match="disk"):
        list(engine.generate(source()))
    assert_empty(engine)


def test_the_source_is_pulled_only_while_there_is_room() -> None:
    pulled = finished = 0

    def source() -> Iterator[EngineRequest]:
        nonlocal pulled
        for i in range(60):
            pulled += 1
            assert pulled - finished <= 3 + LOOKAHEAD
            yield request(f"r{i}", prompt(3 + i % 5), replace(GREEDY, max_tokens=1 + i % 4))

    engine, _ = engine_of(max_seqs=3)
    for event in engine.generate(source()):
        finished += event.finish is not None
    assert finished == pulled == 60


def test_refusals_come_one_by_one() -> None:
    """A file of bad lines is read no faster than its errors are taken."""
    pulled = 0

    def source() -> Iterator[EngineRequest]:
        nonlocal pulled
        for i in range(1000):
            pulled += 1
            yield request(f"r{i}", ())

    engine, _ = engine_of()
    stream = engine.generate(source())
    for _ in range(5):
        assert next(stream).finish == "error"
    assert pulled == 5
    stream.close()


def test_none_means_nothing_right_now() -> None:
    def source() -> Iterator[EngineRequest | None]:
        yield None
        yield request("a", prompt(6))
        yield from [None] * 40
        yield OTHER

    engine, decoder = engine_of()
    events = run_checked(engine, source())
    assert last(events, "a").finish == "length"
    assert_other_is_well(events)
    assert max(map(len, decoder.batches)) == 1


def test_no_request_at_all() -> None:
    engine, decoder = engine_of()
    assert list(engine.generate([])) == []
    assert decoder.steps == 0


def test_logprobs_are_of_the_model_itself() -> None:
    engine, _ = engine_of()
    params = replace(SAMPLED, temperature=2.0, repetition_penalty=1.5, logprobs=3, max_tokens=5)
    events = run_checked(
        engine, [request("a", prompt(6), params), OTHER, request("b", prompt(6, 1), replace(GREEDY, logprobs=0))]
    )
    history = list(prompt(6))
    for event in (e for e in events if e.id == "a"):
        from fake_decoder import reference

        logprobs = reference(history).double().log_softmax(-1)
        top = logprobs.topk(3)
        assert event.logprob.token == event.token
        assert event.logprob.logprob == pytest.approx(float(logprobs[event.token]), abs=1e-5)
        assert [token for token, _ in event.logprob.top] == top.indices.tolist()
        assert [value for _, value in event.logprob.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        history.append(event.token)
    assert all(e.logprob is None for e in events if e.id == "other")
    assert all(e.logprob.top == () for e in events if e.id == "b")


def test_stats_count() -> None:
    engine, decoder = engine_of()
    requests = [request("a", prompt(9)), request("b", prompt(9)), request("c", ())]
    run_checked(engine, requests)
    run_checked(engine, requests[:1])
    stats = engine.stats
    assert (stats.requests, stats.finished, stats.failed) == (4, 3, 1)
    assert (stats.steps, stats.decode_steps) == (24, 23), "the second prompt has one token left"
    assert 0 < stats.decode_host_seconds < stats.host_seconds
    assert stats.computed_tokens == decoder.tokens
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (27, 8, 36)
    assert stats.pages_total == 199
    assert stats.peak_pages_held >= 5
    assert stats.cache_hit_rate == pytest.approx(8 / 27)
    assert stats.decode_tokens == 33
    assert stats.mean_first_token_seconds > 0


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EngineConfig(pages=10, max_seqs=0, max_batch_tokens=1, context=1)


def test_a_step_costs_nothing_for_what_waits_or_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocked head of the line is matched against the cache once, not in every step."""
    engine, _ = engine_of(pages=12)
    calls = 0
    match = engine.scheduler.pool.match

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return match(*args)

    monkeypatch.setattr(engine.scheduler.pool, "match", counted)
    events = run_checked(
        engine, [request("a", prompt(20), replace(GREEDY, max_tokens=20)), request("b", prompt(24, 1))]
    )
    assert last(events, "b").finish == "length"
    assert calls == 3


def test_interrupted_requests_leave_no_penalty_counts(way: str) -> None:
    engine, _ = engine_of()
    params = replace(SAMPLED, presence_penalty=1.0)
    for _ in range(20):
        stream = engine.generate([request("a", prompt(6), params), request("b", prompt(7), params)])
        next(stream)
        stream.close()
    assert len(engine.runner.penalties.counts) <= (2 if way == "plain" else 8)
