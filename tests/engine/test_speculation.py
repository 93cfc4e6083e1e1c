"""Steps that verify expected tokens tell what steps without tell, and are taken only where they pay."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, SAMPLED, answers, prompt, request, run_checked
from engine_work import Odd, Stop, Work, same, told
from fake_decoder import FakeDecoder, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from lagged_cases import WAYS, Draws, Mark, Queue, lagged_engine
from tensor_decoder import TensorDecoder
from torch import Tensor

from minicpm_cli.engine.decode_inputs import DecodeHost, DecodeLayout
from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest
from minicpm_cli.engine.inputs import build
from minicpm_cli.engine.pages import ROOT, PagePool
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import Sequence
from minicpm_cli.engine.speculation import Price, Speculation
from minicpm_cli.engine.stats import Stats
from minicpm_cli.kernels.batch import ForwardBatch

FREE = Price(0.0, 0.0)
LONG = replace(GREEDY, max_tokens=60)


def forgetful(history: list[int], logits: Tensor) -> Tensor:
    """Most scores depend on the last token alone: answers repeat themselves. Whether they do depends on all tokens."""
    return reference(history[-1:]) if sum(history) % 29 else logits


def engine_of(
    lookup: int,
    way: str = "plain",
    pages: int = 200,
    price: Price = FREE,
    alike_rows: int | None = None,
    **options: Any,
) -> tuple[Engine, FakeDecoder]:
    options = {"max_seqs": 4, "max_batch_tokens": 64, "context": 400, "lookup": lookup} | options
    if way == "plain":
        decoder = FakeDecoder(pages, 4)
        engine = Engine(decoder, None, EngineConfig(pages=pages, page_size=4, **options))
    else:
        engine, decoder = lagged_engine(way, pages, alike_rows=alike_rows, **options)
    decoder.spoil = forgetful
    engine._clock = lambda: 0.0  # times of fakes would tell nothing
    if engine.scheduler.speculation:
        engine.scheduler.speculation.price = replace(price)
    return engine, decoder


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(32, 80),
    budget=st.integers(1, 40),
    seats=st.integers(1, 5),
    hosted=st.booleans(),
    lookup=st.integers(1, 10),
    price=st.sampled_from([FREE, Price(0.0, 0.2), Price(0.8, 0.04)]),
)
def test_random_work(seed: int, pages: int, budget: int, seats: int, hosted: bool, lookup: int, price: Price) -> None:
    sizes = {"max_batch_tokens": budget, "max_seqs": seats, "pages": pages}
    work = {"hosted": hosted, "longest": 60, "most": 60}
    want = told(engine_of(0, **sizes)[0], Work(seed, 8, **work))
    for way in ("plain", "lagged", "queued", "replayed"):
        engine, decoder = engine_of(lookup, way, price=price, **sizes)
        assert same(told(engine, Work(seed, 8, **work)), want), way
        assert decoder.largest_step <= budget
        assert engine.stats.accepted_tokens <= engine.stats.proposed_tokens


@pytest.mark.parametrize("way", ["plain", *WAYS])
@pytest.mark.parametrize("params", [LONG, replace(SAMPLED, max_tokens=60, temperature=0.1)])
def test_fewer_steps_the_same_tokens(way: str, params: Any) -> None:
    engine, decoder = engine_of(8, way)
    plain, one_by_one = engine_of(0, way)
    requests = [request("a", [*prompt(20), *prompt(20)], params, seed=3)]
    assert answers(run_checked(engine, requests)) == answers(run_checked(plain, requests))
    assert decoder.steps < 0.8 * one_by_one.steps
    assert decoder.steps == engine.stats.steps
    stats = engine.stats
    assert stats.generated_tokens == plain.stats.generated_tokens == one_by_one.steps
    assert stats.generated_tokens == decoder.steps + stats.accepted_tokens
    assert stats.mean_accepted_tokens == stats.accepted_tokens / stats.drafts > 1


def run_of(engine: Engine, req: EngineRequest) -> list[int]:
    """How many tokens each step of a request alone brought."""
    runs, commit = list[int](), engine.scheduler.commit

    def counted(*args: Any) -> Any:
        events = commit(*args)
        runs.append(len(events))
        return events

    engine.scheduler.commit = counted  # type: ignore[method-assign]
    run_checked(engine, [req])
    return runs


@pytest.mark.parametrize("way", ["plain", "queued"])
def test_ends_inside_an_accepted_run(way: str) -> None:
    """By an end token, a stop of the text, or the number of tokens: after every single token of the answer."""
    start = (*prompt(9), *prompt(9))
    answer = answers(run_checked(engine_of(0)[0], [request("a", start, LONG)]))["a"]
    runs = run_of(engine_of(8, way)[0], request("a", start, LONG))
    assert max(runs) > 4
    for count in range(1, 40):
        limit = replace(LONG, max_tokens=count)
        one, other, _ = (run_checked(engine_of(n, way)[0], [request("a", start, limit)]) for n in (0, 8, 3))
        assert one[-1].finish == other[-1].finish == "length"
        stopped = [run_checked(engine_of(n, way)[0], [request("a", start, LONG, sink=Stop(count))]) for n in (0, 8)]
        for events in (one, other, *stopped):
            assert [event.token for event in events] == answer[:count]
        assert stopped[0][-1].finish == stopped[1][-1].finish == "stop"
    for token in set(answer):
        req = request("a", start, LONG, eos_ids=frozenset({token}))
        one, other = (run_checked(engine_of(n, way)[0], [req]) for n in (0, 8))
        assert [event._replace(timings=None) for event in one] == [event._replace(timings=None) for event in other]


def sealed(pool: PagePool) -> set[bytes]:
    """The beginnings that the prefix cache knows."""
    pages = dict(pool._keys)

    def path(page: int) -> bytes:
        parent, tokens = pages[page]
        return tokens if parent == ROOT else path(parent) + tokens

    return {path(page) for page in pages}


@pytest.mark.parametrize("way", ["plain", "queued"])
@pytest.mark.parametrize("sink", [0, 23])
def test_only_what_came_is_kept_for_other_requests(way: str, sink: int) -> None:
    req = request("a", prompt(9), LONG)
    engines = [engine_of(lookup, way)[0] for lookup in (0, 8)]
    for engine in engines:
        run_checked(engine, [replace(req, sink=Stop(sink) if sink else None)])
    assert engines[1].stats.accepted_tokens > 3
    assert engines[1].stats.accepted_tokens < engines[1].stats.proposed_tokens
    assert sealed(engines[0].scheduler.pool) == sealed(engines[1].scheduler.pool)


def test_no_other_sequence_loses_its_pages_for_a_draft() -> None:
    requests = [request(f"r{i}", prompt(5, i), LONG) for i in range(3)]
    tight = {"pages": 1 + 17 + 5}
    engine, plain = engine_of(8, **tight)[0], engine_of(0, **tight)[0]
    assert answers(run_checked(engine, requests)) == answers(run_checked(plain, requests))
    assert engine.stats.accepted_tokens > 0
    assert 0 < engine.stats.preemptions <= plain.stats.preemptions + 2


def test_not_for_many_nor_for_those_that_the_host_or_penalties_steer() -> None:
    start = (*prompt(9), *prompt(9))
    others = (replace(LONG, repetition_penalty=1.1), replace(LONG, logprobs=1))
    for req in (*(request("a", start, p) for p in others), request("a", start, LONG, mask=Odd())):
        engine, _ = engine_of(8)
        run_checked(engine, [req])
        assert engine.stats.proposed_tokens == 0
    engine, _ = engine_of(8, max_seqs=5)
    run_checked(engine, [request(f"r{i}", start, LONG) for i in range(5)])
    assert engine.stats.proposed_tokens == 0


def test_beside_one_that_is_not_looked_up() -> None:
    requests = [
        request("a", prompt(9), LONG),
        request("b", prompt(9, 1), replace(LONG, presence_penalty=0.5)),
        request("c", prompt(9, 2), replace(LONG, logprobs=1)),
    ]
    for way in ("plain", "queued"):
        engine, plain = engine_of(8, way)[0], engine_of(0, way)[0]
        assert answers(run_checked(engine, requests)) == answers(run_checked(plain, requests))
        assert engine.stats.accepted_tokens > 0


class Repetitive(TensorDecoder):
    """As the forgetful fake."""

    def states(self, batch: ForwardBatch) -> Tensor:
        whole = super().states(batch)
        return torch.where((whole & 31) > 0, batch.ids[batch.last], whole)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device(device: str, graphs: bool) -> None:
    found, stats = [], Stats()
    for lookup in (0, 6):
        sizes = {"max_seqs": 3, "max_batch_tokens": 64, "context": 80, "lookup": lookup, "graphs": graphs}
        engine = Engine(
            Repetitive(90, 4, device),
            None,
            EngineConfig(pages=90, page_size=4, lag=True, **sizes),  # type: ignore[arg-type]
            draw=Draws() if device == "cpu" else None,
        )
        if engine.scheduler.speculation:
            engine.scheduler.speculation.price = replace(FREE)
            stats = engine.stats
        engine._clock = lambda: 0.0
        requests = [request(f"r{i}", prompt(7, i) * 4, (LONG, SAMPLED)[i % 2], seed=i) for i in range(5)]
        requests = [replace(r, params=replace(r.params, max_tokens=40)) for r in requests]
        found.append(answers(run_checked(engine, requests)))
    assert found[0] == found[1]
    assert stats.proposed_tokens > stats.accepted_tokens > 0


class Depths(Queue):
    """How many steps are in flight after each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[int]()

    def submit(self, work: Callable[[], None]) -> Mark:
        mark = super().submit(work)
        self.seen.append(len(self.works))
        return mark


def test_lag_where_nothing_is_expected() -> None:
    """Else the tokens in flight are taken in before the next launch, and told after it."""
    engine, _ = engine_of(8, "lagged")
    depths = Depths()
    assert engine.runner.pipeline is not None
    engine.runner.pipeline.submit = depths.submit
    told = [engine._flight is not None for _ in engine.generate([request("a", prompt(6), LONG)])]
    assert depths.seen[:2] == [1, 2]
    assert depths.seen.count(1) > 5
    assert all(told[:-9])


def test_a_draft_in_flight_whose_request_is_cancelled_changes_nothing_for_others() -> None:
    requests = [request("a", (*prompt(9), *prompt(9)), LONG), request("b", prompt(20, 1), LONG)]
    want = answers(run_checked(engine_of(0, "queued")[0], requests))["b"]
    drafted = 0
    for count in range(1, 40):
        engine, _ = engine_of(8, "queued")
        got = list[int]()
        for event in engine.generate(requests):
            if event.id == "a" and event.usage is None and engine.stats.generated_tokens >= count:
                drafted += (
                    engine._flight is not None and len(engine._flight.plan.joined()) == 2 < engine._flight.plan.tokens
                )
                engine.abort("a")
            if event.id == "b" and event.token is not None:
                got.append(event.token)
        assert got == want, count
    assert drafted > 5


def sequence(tokens: list[int], **params: Any) -> Sequence:
    return Sequence(request("a", tokens, replace(LONG, **params)), 60, 0.0)


def speculation(price: Price, lookup: int = 8, budget: int = 64, most: int | None = None) -> Speculation:
    config = EngineConfig(pages=50, max_seqs=4, max_batch_tokens=budget, context=100, lookup=lookup)
    return Speculation(config, price, Stats(), most)


@pytest.mark.parametrize(("free", "drafted", "held"), [(0, 3, 0), (1, 3, 0), (2, 8, 1), (9, 8, 1)])
def test_pages_for_a_draft_leave_one_for_each_sequence(free: int, drafted: int, held: int) -> None:
    one, two = sequence([1, 2, 3, 4, 5, 6] * 8 + [1, 2, 3, 4, 5]), sequence(list(range(20)))
    pool = PagePool(1 + 4 + 2 + free, 16)
    for seq, pages in ((one, 4), (two, 2)):
        seq.add_pages(pool.take(pages))
        seq.seated = True
    free_before, spec = pool.available, speculation(FREE)
    one.tokens.extend([6, 1, 2, 3, 4, 5, 6, 1])  # 61 tokens: 3 places are left on their pages
    assert spec.draft([one], pool) == len(one.draft)
    assert (len(one.draft), free_before - pool.available) == (drafted, held)


def test_as_many_as_pay() -> None:
    good, new = sequence([1, 2, 3, 4, 5, 6] * 6), sequence(list(range(30)))
    weak = sequence([1, 2, 50, 1, 2])
    assert speculation(FREE).counts([good, new, weak]) == [8, 0, 8]
    assert speculation(FREE, budget=8).counts([good, weak]) == [6, 0]
    assert speculation(FREE, budget=1).counts([good]) == [0]
    assert speculation(Price(0, 0.2)).counts([good]) == [5]
    assert speculation(Price(0, 0.2)).counts([good, weak]) == [4, 0]
    assert speculation(Price(0, 0.2)).counts([weak]) == [1]
    assert speculation(Price(0, 0.3)).counts([weak]) == [0]
    assert speculation(Price(2, 0.04)).counts([good]) == [8]
    assert speculation(Price(9, 0.04)).counts([good]) == [0]
    assert speculation(FREE).counts([good] * 5) == [0] * 5
    assert speculation(FREE).counts([sequence([1, 2] * 9, presence_penalty=1)]) == [0]


def test_steps_that_take_longer_than_thought_are_taken_less() -> None:
    price = Price(0.0, 0.2)
    for _ in range(50):
        price.timed(1, 0, 0.010)
    assert price.plain == pytest.approx(0.010)
    for _ in range(100):
        price.timed(1, 4, 0.036)
    assert price.of(1, 4) == pytest.approx(3.6, rel=0.02)
    assert price.of(1, 0) == 1
    price.timed(1, 4, 5.0)
    assert price.of(1, 4) < 5, "one that waited for something else says little"
    for _ in range(2000):
        price.timed(1, 0, 0.010)
    assert price.of(1, 4) == pytest.approx(1.8, rel=0.05), "it is tried again some time"


@pytest.mark.parametrize("slow", [0.5, 1.0, 2.0])
def test_what_does_not_pay_stops(slow: float) -> None:
    """On a device whose rows cost up to ten times of what was thought, little is lost."""
    engine, decoder = engine_of(8, price=Price(0.0, 0.2))
    now = [0.0]
    engine._clock = lambda: now[0]
    decoder.before_step = lambda step: now.__setitem__(0, now[0] + 1)
    forward = engine.runner.forward.step

    def timed(batch: Any, kv: Any) -> Tensor:
        now[0] += slow * (len(batch.ids) - 1) if len(batch.ids) < 10 else 0
        return forward(batch, kv)

    engine.runner.forward.step = timed
    run_checked(engine, [request("a", prompt(9), replace(LONG, max_tokens=380))])
    assert now[0] < 380 * 1.25


@pytest.mark.parametrize(("alike", "longest"), [(None, 9), (8, 8), (3, 3), (2, 2)])
def test_no_more_rows_than_come_out_alike(alike: int | None, longest: int) -> None:
    engine, decoder = engine_of(8, "queued", alike_rows=alike)
    run_checked(engine, [request("a", (*prompt(9), *prompt(9)), LONG)])
    assert max(size for size in map(len, decoder.batches[1:])) == longest
    assert speculation(FREE, most=3).counts([sequence([1, 2, 3, 4, 5, 6] * 6)] * 2) == [1, 0]


def test_no_drafts_where_no_two_rows_come_out_alike() -> None:
    engine, _ = engine_of(8, "queued", alike_rows=1)
    assert engine.scheduler.speculation is None
    assert answers(run_checked(engine, [request("a", prompt(9), LONG)]))


def test_each_row_of_a_draft_has_the_draw_of_its_own_place() -> None:
    """However its step is put together."""
    one, two = sequence([1, 2, 3, 4, 5], temperature=0.5), sequence(list(range(9)), temperature=0.5)
    one.tokens.append(9)
    for seq in (one, two):
        seq.add_pages([5, 7])
        seq.planned = len(seq.tokens)
        seq.length = len(seq.tokens) + 1
    one.draft = array("i", [4, 4])
    rows = [Chunk(one, 5, 1, True), Chunk(one, 6, 1, True), Chunk(one, 7, 1, True), Chunk(two, 8, 1, True)]
    plan, penalties = Plan(rows, 2), Penalties(97, torch.device("cpu"), 2)
    mixed = build(plan, 16, penalties=penalties)
    layout = DecodeLayout(4, 3)
    single = DecodeHost(layout, 16, penalties, pinned=False)
    single.fill(plan, 4, "drawn")
    for host in (mixed.layout.host(mixed.buffer), layout.step(4)[0].host(single.buffer)):
        assert host["index"].tolist() == [1, 2, 3, 0]
        assert host["ids"].tolist() == [9, 4, 4, 8]
        assert host["seed"].tolist() == [5] * 4
