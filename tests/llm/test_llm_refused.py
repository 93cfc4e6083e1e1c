"""A request that cannot be put to the engine is told at once, and is nobody else's trouble."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from minicpm_cli.errors import RequestError
from minicpm_cli.types import Message, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=3, seed=1)
GOOD = Request("good", "hello you", PARAMS)


def endless(*requests: Request) -> Iterator[Request | None]:
    """A source that never ends, as a server's."""
    yield from requests
    while True:
        yield None


def test_it_is_told_while_nothing_else_comes(load) -> None:
    bad = Request("bad", (Message("wizard", "x"),), PARAMS)  # type: ignore[arg-type]
    with closing(load().stream(endless(bad))) as events:
        event = next(events)
    assert (event.id, event.finish) == ("bad", "error")
    assert isinstance(event.error, RequestError)


@pytest.mark.parametrize("first", [True, False])
def test_a_defect_that_one_text_lays_bare_ends_that_request_only(load, monkeypatch, first: bool) -> None:
    llm, bad = load(), Request("bad", "x", PARAMS)
    build = llm._prompter.build
    monkeypatch.setattr(llm._prompter, "build", lambda request: 1 / 0 if request.id == "bad" else build(request))
    ends = {event.id: event for event in llm.stream([bad, GOOD] if first else [GOOD, bad]) if event.finish}
    assert isinstance(ends["bad"].error, ZeroDivisionError)
    assert ends["good"].finish == "length"


@pytest.mark.parametrize("ids", [None, [5, 6]])
def test_a_bias_for_a_token_that_is_not_there(load, ids: list[int] | None) -> None:
    params = SamplingParams(max_tokens=3, seed=1, logit_bias=((2**30, 1.0),))
    events = list(load().stream([Request("bad", "hello", params, ids=ids), GOOD]))
    ends = {event.id: event for event in events if event.finish}
    assert "logit_bias names token 1073741824" in str(ends["bad"].error)
    assert ends["good"].finish == "length"
