"""Structured output through template, engine and detokenizer: random weights write what they are asked for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from checkpoints import FAMILIES, write_checkpoint
from minicpm_cli.errors import RequestError
from minicpm_cli.types import Event, Message, Request, SamplingParams
from structured import SCHEMA, answered

HELLO = (Message("user", "hello world"),)
TEXT = json.dumps(SCHEMA)
THINKS = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"


def ask(name: str = "a", prefill: str = "", **given: Any) -> Request:
    return Request(name, HELLO, SamplingParams().checked({"max_tokens": 120, "seed": 1} | given), prefill)


def assert_valid(said: tuple[str, Event], schema: dict[str, Any] = SCHEMA) -> None:
    text, last = said
    assert last.error is None
    assert (last.finish, last.incomplete) == ("stop", False)
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "minicpm-sala"])
def test_every_family_writes_valid_json(load, tmp_path: Path, family: str) -> None:
    llm = load(write_checkpoint(tmp_path / "m", family))
    assert_valid(answered(llm, [ask(schema=TEXT, think=False)])["a"])


@pytest.mark.parametrize("options", [{}, {"lookup": 4}, {"max_batch_tokens": 8}, {"max_seqs": 1}])
def test_requests_of_different_schemas_and_none_share_steps(load, options: dict[str, Any]) -> None:
    llm = load(**{"max_seqs": 4} | options)
    requests = [
        ask("json", schema=TEXT, temperature=2.0),
        ask("date", regex=r"\d{4}-\d\d-\d\d"),
        ask("free", max_tokens=20),
        ask("other", schema=json.dumps({"enum": ["red", "green"]}), temperature=0.0),
        ask("json 2", schema=TEXT, temperature=2.0, repetition_penalty=1.3),
    ]
    said = answered(llm, requests)
    assert_valid(said["json"])
    assert_valid(said["json 2"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", said["date"][0], re.ASCII)
    assert said["other"][0] in ('"red"', '"green"')
    for request in requests:
        alone = answered(llm, [request])[request.id]
        assert alone[0] == said[request.id][0], "whoever shares its batch, and with its prompt in the cache"
    plain = answered(load(), [requests[2]])["free"]
    assert plain[0] == said["free"][0]


def test_preempted_answers_go_on_where_they_were(load) -> None:
    llm = load(max_seqs=4)
    crowd = [ask(str(n), schema=TEXT, seed=n) for n in range(4)]
    expected = {r.id: answered(llm, [r])[r.id][0] for r in crowd}
    pool = llm._engine.scheduler.pool
    llm.forget()
    held = pool.take(pool.available - 9)
    said = answered(llm, crowd)
    pool.drop(held)
    assert llm._engine.stats.preemptions
    for name, each in said.items():
        assert_valid(each)
        assert each[0] == expected[name]


def test_a_grammar_that_allows_everything_changes_nothing(load) -> None:
    """Where the free answer is text at all: random weights write whatever token there is."""
    llm, compared = load(), 0
    known = llm._prompter.tokenizer
    text = set(range(known.vocab_size)) - known.control_ids
    for n in range(60):
        request = Request("a", f"hello {n} the", SamplingParams(max_tokens=3, temperature=0.0, logprobs=0))
        events = list(llm.stream([request]))
        free = "".join(event.text for event in events)
        if free.isascii() and text >= {each.token for event in events for each in event.logprobs}:
            params = replace(request.params, regex="(?s).*")
            assert answered(llm, [replace(request, params=params)])["a"][0] == free
            compared += 1
    assert compared > 5


def test_an_answer_that_is_cut_is_incomplete(load) -> None:
    llm = load()
    text, last = answered(llm, [ask(schema=TEXT, max_tokens=6)])["a"]
    assert (last.finish, last.incomplete) == ("length", True)
    assert text.startswith("{")
    digits = [answered(llm, [ask(regex="[0-9]+", max_tokens=4, seed=n)])["a"][1] for n in range(8)]
    assert {(last.finish, last.incomplete) for last in digits} == {("length", True), ("stop", False)}
    stopped = answered(llm, [ask(schema=TEXT, stop=[","])])["a"]
    assert (stopped[1].finish, stopped[1].incomplete) == ("stop", True)
    fine = answered(llm, [ask(regex="a{3}b{2}", stop=["bb"])])["a"]
    assert (fine[0], fine[1].incomplete) == ("aaa", True)
    whole = answered(llm, [ask(regex="a{3}(bb)?", stop=["bb"])])["a"]
    assert (whole[0], whole[1].incomplete) == ("aaa", False)
    exact = answered(llm, [ask(regex="abc", max_tokens=3)])["a"]
    assert (exact[0], exact[1].finish, exact[1].incomplete) == ("abc", "stop", False)


def test_a_prefill_is_the_beginning_of_the_answer(load) -> None:
    begun = '{"ok": true, "si'
    text, last = answered(load(), [ask(schema=TEXT, prefill=begun)])["a"]
    assert_valid((begun + text, last))
    wrong = answered(load(), [ask(schema=TEXT, prefill="Sure!")])["a"][1]
    assert isinstance(wrong.error, RequestError)
    assert wrong.error.code == "schema_invalid"


@pytest.mark.parametrize("budget", [0, 7])
def test_the_answer_after_thinking_is_valid(load, tmp_path: Path, budget: int) -> None:
    (tmp_path / "t.jinja").write_text(THINKS)
    llm = load(chat_template=str(tmp_path / "t.jinja"))
    assert_valid(answered(llm, [ask(schema=TEXT, think_budget=budget)])["a"])
    text, last = answered(llm, [ask(schema=TEXT, max_tokens=20)])["a"]
    assert (text, last.finish, last.incomplete) == ("", "length", True)


def test_a_bad_schema_is_that_requests_error_alone(load) -> None:
    said = answered(load(), [ask("bad", schema='{"not": {}}'), ask("good", schema=TEXT)])
    error = said["bad"][1].error
    assert isinstance(error, RequestError)
    assert error.code == "schema_invalid"
    assert_valid(said["good"])
    with pytest.raises(RequestError, match="not is not supported"):
        load().encoded(ask(schema='{"not": {}}'))


def test_the_same_seed_writes_the_same_and_logprobs_are_told(load) -> None:
    llm = load()
    first, second = (list(llm.stream([ask(schema=TEXT, logprobs=2)])) for _ in range(2))
    assert [e.text for e in first] == [e.text for e in second]
    assert sum(len(e.logprobs) for e in first) == first[-1].usage.completion_tokens  # type: ignore[union-attr]
