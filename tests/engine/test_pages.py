"""The pool against a model of it: what is held, what must be found again, what must never be."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minicpm_cli.engine.pages import DUMMY, ROOT, PagePool

SIZE = 2


def ints(*values: int) -> array[int]:
    return array("i", values)


def sealed(pool: PagePool, tokens: array[int]) -> list[int]:
    """Pages of all of `tokens`, computed and sealed, held once."""
    pages, parent = pool.take(len(tokens) // pool.page_size), ROOT
    for i, page in enumerate(pages):
        parent = pages[i] = pool.seal(page, parent, tokens[i * SIZE : (i + 1) * SIZE].tobytes())
    return pages


def test_the_dummy_is_never_given() -> None:
    pool = PagePool(5, SIZE)
    assert pool.usable == 4
    assert DUMMY not in pool.take(4)
    assert pool.available == 0


def test_one_page_alone_cannot_work() -> None:
    with pytest.raises(ValueError, match="dummy"):
        PagePool(1, SIZE)


def test_a_match_is_the_longest_run_of_full_pages() -> None:
    pool = PagePool(10, SIZE)
    pages = sealed(pool, ints(1, 2, 3, 4, 5, 6))
    pool.drop(pages)
    assert pool.match(ints(1, 2, 3, 4, 9, 9), 3) == pages[:2]
    assert pool.match(ints(1, 2, 3, 4, 5, 6), 2) == pages[:2]
    assert pool.match(ints(1, 2, 3, 4, 5, 6, 7, 8), 4) == pages
    assert pool.match(ints(3, 4), 1) == []  # the same tokens elsewhere are another page
    pool.check()


def test_unsealed_pages_are_not_found_and_are_free_when_dropped() -> None:
    pool = PagePool(4, SIZE)
    pages = pool.take(2)
    assert pool.match(ints(1, 2), 1) == []
    pool.drop(pages)
    assert pool.idle == 0
    assert pool.available == 3


def test_sealing_what_is_known_gives_back_the_own_page() -> None:
    pool = PagePool(6, SIZE)
    first = sealed(pool, ints(1, 2, 3, 4))
    second = sealed(pool, ints(1, 2, 3, 4))
    assert second == first
    assert pool.held == 2
    pool.drop(first)
    assert pool.held == 2
    pool.drop(second)
    assert (pool.held, pool.idle) == (0, 2)
    pool.check()


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    pool = PagePool(5, SIZE)
    old, new = sealed(pool, ints(1, 1, 2, 2)), sealed(pool, ints(3, 3, 4, 4))
    pool.drop(new)
    pool.drop(old)
    pool.drop(pool.match(ints(3, 3), 1))  # only the first page of `new` is used again
    pool.take(1)
    assert pool.match(ints(3, 3, 4, 4), 2) == new[:1]
    pool.take(2)
    assert pool.match(ints(1, 1, 2, 2), 2) == []
    pool.check()


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(4, SIZE, caching=False)
    pool.drop(sealed(pool, ints(1, 2, 3, 4)))
    assert pool.match(ints(1, 2, 3, 4), 2) == []
    assert pool.idle == 0
    pool.check()


def test_keys_compare_tokens_whole() -> None:
    """Python hashes -1 and -2 alike; pages whose keys collide stay apart."""
    pool = PagePool(4, SIZE)
    assert hash((ROOT,)) == hash((-2,))
    first, second = sealed(pool, ints(0, 256)), sealed(pool, ints(256, 0))
    assert first != second
    assert pool.match(ints(256, 0), 1) == second


@pytest.mark.parametrize("damage", ["_idle", "_free", "_refs", "_keys"])
def test_recover_mends_whatever_an_interrupt_left(damage: str) -> None:
    pool = PagePool(8, SIZE)
    pages = sealed(pool, ints(1, 2, 3, 4))
    pool.drop(sealed(pool, ints(1, 2, 9, 9)))
    pool.take(1)
    state = getattr(pool, damage)
    if damage == "_refs":
        state[pages[0]] = 0
    else:
        state.clear()
    with pytest.raises(AssertionError):
        pool.check()
    pool.recover()
    pool.check()
    assert pool.held == 0
    assert pool.match(ints(1, 2, 3, 4), 2) == pages
    assert pool.idle == 1


def test_recover_drops_pages_whose_parent_is_not_known() -> None:
    pool = PagePool(8, SIZE)
    pages = sealed(pool, ints(1, 2, 3, 4))
    del pool._index[ROOT, ints(1, 2).tobytes()]
    pool.recover()
    pool.check()
    assert pool.idle == 0
    assert pages[0] in pool.take(7)


class PoolMachine(RuleBasedStateMachine):
    """Holders with the tokens of their pages; the pool must agree with them about every page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, SIZE)
        self.holders: list[tuple[array[int], list[int], int]] = []  # tokens, pages, of which sealed
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=8), commit=st.integers(0, 4))
    def begin(self, tokens: list[int], commit: int) -> None:
        ids, full = array("i", tokens), len(tokens) // SIZE
        found = self.pool.match(ids, full)
        for i, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: (i + 1) * SIZE])
        if full - len(found) > self.pool.available:
            self.pool.drop(found)
            return
        pages, done = found + self.pool.take(full - len(found)), len(found)
        while done < min(full, len(found) + commit):
            parent = pages[done - 1] if done else ROOT
            pages[done] = self.pool.seal(pages[done], parent, ids[done * SIZE : (done + 1) * SIZE].tobytes())
            self.content[pages[done]] = tuple(tokens[: (done + 1) * SIZE])
            done += 1
        self.holders.append((ids, pages, done))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.drop(pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.idle == 0

    @rule()
    def interrupt(self) -> None:
        self.holders.clear()
        self.pool.recover()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        held = {page for _, pages, _ in self.holders for page in pages}
        assert self.pool.held == len(held)
        for tokens, pages, done in self.holders:
            for i in range(done):
                assert self.content[pages[i]] == tuple(tokens[: (i + 1) * SIZE])
            unsealed = pages[done:]
            others = [p for _, theirs, _ in self.holders if theirs is not pages for p in theirs]
            assert not set(unsealed) & set(others), "two sequences write the same page"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
