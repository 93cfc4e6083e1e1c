"""In which order waiting requests are handed out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from batch_tools import rows, run, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeLLM
from minicpm_cli.batch.records import Row
from minicpm_cli.batch.window import UNIT, PrefixWindow, Ready, prefix_chain
from minicpm_cli.types import Request


def ready(number: int, prefix: str = "", size: int = 1) -> Ready:
    """Each letter of the prefix is a unit of tokens; what follows is the row's own."""
    ids = [ord(letter) for letter in prefix for _ in range(UNIT)] + [1000 + number] * 2 * UNIT
    return Ready(Row(number, number), Request(str(number), "x"), size, prefix_chain(ids))


def taken(window: PrefixWindow) -> list[int]:
    return [one(window) for _ in range(len(window))]


def one(window: PrefixWindow) -> int:
    ready = window.take()
    assert ready is not None
    window.computed(ready.chain)
    return ready.row.line


def test_chains_are_equal_as_far_as_whole_units_are() -> None:
    one, other = [1] * UNIT + [2] * UNIT + [3], [1] * UNIT + [2] * (UNIT - 1) + [4, 3]
    assert len(prefix_chain(one)) == len(prefix_chain(other)) == 2
    assert prefix_chain(one)[0] == prefix_chain(other)[0]
    assert prefix_chain(one)[1] != prefix_chain(other)[1]
    assert prefix_chain([1] * (UNIT - 1)) == prefix_chain([]) == ()


def test_rows_without_a_common_prefix_keep_their_order() -> None:
    window = PrefixWindow()
    for number in range(50):
        window.add(ready(number))
    assert taken(window) == list(range(50))


def test_the_longest_prefix_goes_first_and_the_oldest_of_equals() -> None:
    window = PrefixWindow()
    for number, prefix in enumerate(["ab", "c", "abd", "ab", "", "c", "abd", "a"]):
        window.add(ready(number, prefix))
    assert taken(window) == [0, 2, 6, 3, 7, 1, 5, 4]
    assert window.take() is None


def test_the_next_round_goes_on_with_the_last_prefix() -> None:
    window = PrefixWindow()
    window.add(ready(0, "b"))
    assert one(window) == 0
    for number, prefix in ((1, "a"), (2, "b"), (3, "a")):
        window.add(ready(number, prefix))
    assert taken(window) == [2, 1, 3]


def test_full_by_rows_or_by_bytes() -> None:
    window = PrefixWindow(rows=3, size=100)
    for number in range(3):
        assert not window.full
        window.add(ready(number))
    assert window.full
    window.take()
    assert not window.full
    window.add(ready(9, size=200))  # one line may be larger than all that may wait
    assert window.full
    assert taken(window) == [1, 2, 9]
    assert not window.full


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=150), st.integers(1, 9))
def test_every_row_once_and_none_overtaken_by_more_than_two_windows(prefixes: list[str], rows_: int) -> None:
    window, waiting, order = PrefixWindow(rows=rows_), list(enumerate(prefixes)), []
    while waiting or len(window):
        while waiting and not window.full:
            number, prefix = waiting.pop(0)
            window.add(ready(number, prefix))
        order.append(one(window))
        assert len(window) < rows_
    assert sorted(order) == list(range(len(prefixes)))
    for place, number in enumerate(order):
        assert sum(later > number for later in order[:place]) <= 2 * rows_


LONG, OTHER = "abcdefgh", "ijklmnopqr"


def test_a_long_common_prefix_is_computed_once() -> None:
    window = PrefixWindow()
    for number, prefix in enumerate([LONG, LONG, OTHER, LONG + "x", "a", OTHER]):
        window.add(ready(number, prefix))
    leaders = [window.take() for _ in range(3)]
    assert [found and found.row.line for found in leaders] == [0, 4, 2]  # a short prefix is not worth waiting for
    assert window.take() is None
    window.computed(leaders[2].chain)  # type: ignore[union-attr]
    assert one(window) == 5
    assert window.take() is None
    window.computed(leaders[0].chain)  # type: ignore[union-attr]
    assert taken(window) == [1, 3]


def test_a_prefix_that_takes_too_long_is_not_waited_for() -> None:
    window = PrefixWindow()
    for number in range(3):
        window.add(ready(number, LONG))
    waited = [window.take() for _ in range(40)]
    assert [n for n, found in enumerate(waited) if found] == [0, 17, 34]


def test_rows_of_the_next_round_go_while_those_of_this_one_wait() -> None:
    window = PrefixWindow()
    window.add(ready(0, LONG))
    window.add(ready(1, LONG))
    leader = window.take()
    window.add(ready(2, OTHER))
    assert one(window) == 2
    assert window.take() is None
    window.computed(leader.chain)  # type: ignore[union-attr]
    assert one(window) == 1


def test_rows_of_a_file_are_grouped_by_their_system_prompts(tmp_path: Path) -> None:
    """Three system prompts, one row after the other: with one seat, the engine changes the prompt a few times only."""
    systems = [" ".join(f"{name}{n}" for n in range(80)) for name in "abc"]
    lines = [{"id": i, "system": systems[i % 3], "prompt": f"q {i}"} for i in range(300)]
    source, llm = write_lines(tmp_path / "in", lines), FakeLLM(seats=1, delay=0.0005)
    assert run(source, tmp_path / "out", llm).ok == 300
    begins = [request.messages[0].content[0] for request in llm.seen]  # type: ignore[union-attr]
    assert sum(a != b for a, b in pairwise(begins)) < 60
    ordered = tmp_path / "ordered"
    assert run(source, ordered, FakeLLM(), ordered=True).ok == 300
    assert [row["id"] for row in rows(ordered)] == list(range(300))
