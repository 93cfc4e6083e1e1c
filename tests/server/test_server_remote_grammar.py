"""A schema that another program is asked to follow: whether it did is judged here, as far as JSON goes."""

from __future__ import annotations

import pytest

from fakes import FakeLLM
from minicpm_cli.llm.remote import RemoteLLM
from minicpm_cli.types import Message, Request, SamplingParams

SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize(
    ("answer", "given", "incomplete"),
    [
        ('{"a":  1}\n', {"schema": SCHEMA}, False),
        ("Sure! {}", {"schema": SCHEMA}, True),
        ('{"a": "b c d e"}', {"schema": SCHEMA, "max_tokens": 2}, True),
        ("yes", {"regex": "yes|no"}, False),
        ("yes it is", {"regex": ".*", "max_tokens": 1}, True),
        ("Sure!", {}, False),
        ("Sure! It is", {"max_tokens": 1}, False),
    ],
)
def test_an_answer_that_is_no_json_or_was_cut_is_incomplete(serve, answer: str, given: dict, incomplete: bool) -> None:
    llm = RemoteLLM.open(serve(FakeLLM(answer=lambda request: answer)).url, None, None, given)
    request = Request("a", (Message("user", "hello"),), SamplingParams().checked(given))
    last = list(llm.stream([request]))[-1]
    assert last.error is None
    assert last.incomplete is incomplete
