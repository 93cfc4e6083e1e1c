"""Prompt lookup: what is expected next, and how far it is trusted."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from minicpm_cli.engine.lookup import Lookup

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def last_time(tokens: list[int]) -> tuple[int, int] | None:
    """Where the last occurrence of the longest known ending is followed, and how long that is; by searching."""
    for n in (4, 3, 2):
        for place in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[place - n : place] == tokens[-n:]:
                return place, n
    return None


def repeated(tokens: list[int], place: int, count: int) -> list[int]:
    longer = list(tokens)
    for i in range(count):
        longer.append(longer[place + i])
    return longer[len(tokens) :]


@given(texts, st.integers(1, 12))
def test_the_last_occurrence_of_the_longest_ending(tokens: list[int], count: int) -> None:
    lookup, found = Lookup(array("i", tokens)), last_time(tokens)
    assert bool(lookup.odds(count)) == (found is not None)
    if found:
        assert lookup.draft(count).tolist() == repeated(tokens, found[0], count)


@given(texts, texts)
def test_tokens_that_come_later_are_found_as_those_that_were_there(start: list[int], more: list[int]) -> None:
    """Where a repetition goes on for four tokens or more it is followed, though another place may be nearer."""
    tokens = array("i", start)
    lookup = Lookup(tokens)
    for token in more:
        tokens.append(token)
        found, expected = last_time(tokens.tolist()), lookup.odds(1)
        assert bool(expected) == (found is not None)
        if found is None:
            continue
        place, agree = lookup._place, lookup._agree
        assert tokens[place - agree : place] == tokens[len(tokens) - agree :]
        assert agree >= found[1]
        if found[1] < 4:
            assert place == found[0]


def test_a_draft_runs_into_itself() -> None:
    assert Lookup(array("i", [7, 5, 6, 5, 6])).draft(7).tolist() == [5, 6, 5, 6, 5, 6, 5]


def test_nothing_is_expected_of_what_is_new() -> None:
    for tokens in ([1], [1, 1], [1, 2, 3, 4, 5, 1]):
        assert Lookup(array("i", tokens)).odds(3) == []


def test_odds_fall_with_what_did_not_come_and_rise_again() -> None:
    tokens = array("i", [1, 2, 50])
    lookup = Lookup(tokens)
    first = None
    for new in range(100, 120):  # after 1, 2 always something else comes
        tokens.extend([1, 2])
        (now,) = lookup.odds(1)
        first = first or now
        tokens.append(new)
    assert now < 0.1 < first
    tokens.extend([9, 8, 7, 6] * 30)
    assert lookup.odds(8)[0] > 0.95
    assert lookup.odds(8)[7] > 0.7
    tokens.extend([1, 2])
    assert lookup.odds(1)[0] < 0.2
