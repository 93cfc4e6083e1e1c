"""Stretches of free pages against a plain set of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine_cases import GREEDY, answers, engine_of, prompt, request, run_checked

from minicpm_cli.engine.pages import AHEAD, ROOT, PagePool
from minicpm_cli.engine.stretches import Stretches


def consecutive(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def checked(stretches: Stretches, free: set[int]) -> None:
    assert sorted(stretches) == sorted(free)
    assert len(stretches) == len(free)
    known = [start for sizes in stretches._sizes for start in sizes]
    assert sorted(known) == sorted(stretches._stops)
    assert all(stretches._starts[stop] == start for start, stop in stretches._stops.items())
    assert len(stretches._starts) == len(stretches._stops)
    assert not set(stretches._starts) & set(stretches._stops), "two stretches touch"


@pytest.mark.parametrize("seed", range(6))
def test_against_a_set(seed: int) -> None:
    draw = random.Random(seed)
    free = set(draw.sample(range(1, 80), 40))
    stretches = Stretches(sorted(free))
    for _ in range(400):
        checked(stretches, free)
        held = sorted(set(range(1, 80)) - free)
        move = draw.random()
        if move < 0.45 and held:
            page = draw.choice(held)
            start = stretches.add(page)
            free.add(page)
            assert start == max(p for p in range(81) if p not in free and p < page) + 1
        elif move < 0.6 and free:
            free.remove(stretches.take())
        elif move < 0.8:
            count = draw.randint(1, 12)
            took = stretches.take_run(count)
            assert not took or (consecutive(took) and len(took) == count and set(took) <= free)
            free -= set(took)
        else:
            start, count = draw.randint(1, 80), draw.randint(1, 6)
            took = stretches.take_from(start, count)
            fits = start - 1 not in free and set(range(start, start + count)) <= free
            assert took == (list(range(start, start + count)) if fits else [])
            free -= set(took)


def test_a_long_run_is_left_to_those_who_ask_for_many() -> None:
    stretches = Stretches([*range(1, 3), *range(10, 50), *range(60, 68)])
    assert {stretches.take() for _ in range(2)} == {1, 2}
    assert stretches.take_run(6) == list(range(60, 66))
    assert stretches.take_run(30) == list(range(10, 40))
    assert stretches.take_run(30) == []


def test_pages_follow_those_that_are_held() -> None:
    pool = PagePool(40, 2)
    first = pool.take(5)
    pool.drop(pool.take(3)[:1])
    assert pool.take(1, first[-1]) == [first[-1] + 1]
    assert pool.take(4, first[-1] + 1) == [first[-1] + i for i in range(4, 8)]  # not those: elsewhere, together
    pool.check()


def test_several_pages_follow_those_that_are_held_though_others_would_do() -> None:
    pool = PagePool(60, 2)
    _, between, held = pool.take(5), pool.take(10), pool.take(3)
    pool.drop(between)
    assert pool.take(4, held[-1]) == [held[-1] + i for i in range(1, 5)]
    assert pool.take(4) == between[:4]
    pool.check()


def test_what_is_least_used_goes_until_pages_are_consecutive_but_not_much_more() -> None:
    """Pages of two sequences that grew side by side are cached; a prompt asks for as many as one had."""
    pool = PagePool(1056, 2)
    one, other = list[int](), list[int]()
    for i in range(500):
        for pages in (one, other):
            page = pool.take(1)[0]
            pages.append(pool.seal(page, pages[-1] if pages else ROOT, bytes([i % 256, i // 256, pages is one])))
    pool.drop(one)
    pool.drop(other)
    free = pool.available - pool.idle
    got = pool.take(free + 10)
    assert not consecutive(got)
    assert pool.idle >= 1000 - 10 - 1056 // AHEAD
    pool.check()


def test_prompts_find_consecutive_pages_where_others_have_come_and_gone() -> None:
    """Prompts of 8 pages and answers of up to 4, one page at a time, in a pool whose pages are all cached soon."""
    pool, draw, alive, found = PagePool(800, 2), random.Random(3), list[list[int]](), list[bool]()
    for number in range(600):
        if len(alive) == 20:
            pool.drop(alive.pop(draw.randrange(20)))
        pages = pool.take(8)
        found.append(consecutive(pages))
        for place, page in enumerate(pages):
            pages[place] = pool.seal(page, pages[place - 1] if place else ROOT, number.to_bytes(4, "big"))
        alive.append(pages)
        for pages in draw.sample(alive, min(len(alive), 4)):
            if len(pages) < 12:
                pages.append(pool.seal(pool.take(1, pages[-1])[0], pages[-1], b"answer"))
    assert pool.idle > 400
    assert sum(found) > 0.95 * len(
        found
    )  # a seventh of them where pages are handed out in the order in which they fell free


def test_a_conversation_stays_in_consecutive_pages() -> None:
    """Its next turn begins with the pages of the last one, and goes on behind them."""
    engine, runs, history = engine_of(pages=400)[0], list[int](), list(prompt(9))
    plan = engine.scheduler.plan

    def seen() -> Any:
        made = plan()
        runs.extend(seq.run for seq, _, size, _ in made.chunks if size > 1)
        return made

    engine.scheduler.plan = seen  # type: ignore[method-assign]
    for turn in range(5):
        answer = answers(run_checked(engine, [request("a", history, replace(GREEDY, max_tokens=30))]))["a"]
        history += [*answer, *prompt(7, turn)]
    assert len(runs) == 5
    assert set(runs) == {1}
    assert engine.stats.cached_tokens > 250
