"""Where an answer ends: at the model's own token, or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minicpm_cli.errors import RequestError
from minicpm_cli.types import Message, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=5, seed=1)


def test_the_model_s_end_may_be_ignored(load) -> None:
    """But a regex says where its answer ends."""
    llm = load()
    end = min(llm._prompter.eos_ids)
    ending = replace(PARAMS, logit_bias=((end, 100.0),))
    asked = {
        "ended": ending,
        "on": replace(ending, ignore_eos=True),
        "held": replace(PARAMS, ignore_eos=True, regex="[ab]"),
        "held and ended": replace(ending, ignore_eos=True, regex="[ab]+"),
    }
    ends = {
        e.id: e for e in llm.stream([Request(name, "hello you", params) for name, params in asked.items()]) if e.finish
    }
    assert {name: event.finish for name, event in ends.items()} == {
        "ended": "stop",
        "on": "length",
        "held": "stop",
        "held and ended": "stop",
    }
    assert ends["on"].usage is not None
    assert ends["on"].usage.completion_tokens == PARAMS.max_tokens


@pytest.mark.parametrize("least", [1, 3, 5])
def test_an_answer_has_so_many_tokens_before_it_may_end(load, least: int) -> None:
    """However much the model wants to; thinking with a budget counts, too."""
    llm = load()
    end = min(llm._prompter.eos_ids)
    ending = replace(PARAMS, logit_bias=((end, 100.0),), min_tokens=least)
    asked = {"a": ending, "b": replace(ending, think_budget=2), "c": replace(ending, max_tokens=None)}
    ends = {
        e.id: e for e in llm.stream([Request(name, "hello you", params) for name, params in asked.items()]) if e.finish
    }
    assert {event.finish for event in ends.values()} == {"stop" if least < 5 else "length", "stop"}
    assert ends["c"].usage.completion_tokens == least + 1
    assert ends["a"].usage.completion_tokens == min(least + 1, 5)


def test_what_says_itself_where_an_answer_ends_takes_no_least_length(load) -> None:
    params = replace(PARAMS, min_tokens=3, regex="[ab]")
    (event,) = load().stream([Request("a", "hello you", params)])
    assert isinstance(event.error, RequestError)
    assert (event.error.code, "regex" in str(event.error)) == ("bad_parameter", True)


def test_an_answer_cannot_be_longer_than_it_may_be(load) -> None:
    """That is no reason to answer nobody else."""
    asked = {"a": replace(PARAMS, min_tokens=6), "b": replace(PARAMS, min_tokens=5)}
    events = {e.id: e for e in load().stream([Request(name, "hello you", p) for name, p in asked.items()]) if e.finish}
    assert isinstance(events["a"].error, RequestError)
    assert "min_tokens is 6, more than max_tokens, 5" in str(events["a"].error)
    assert events["b"].error is None


def test_a_stop_string_ends_an_answer_before_its_least_length(load) -> None:
    llm = load()
    params = replace(PARAMS, min_tokens=5)
    text = "".join(event.text for event in llm.stream([Request("a", "hello you", params)]))
    params = replace(params, stop=(text[:1],))
    assert [event.finish for event in llm.stream([Request("a", "hello you", params)]) if event.finish] == ["stop"]


@pytest.mark.parametrize(("tail", "channel"), [("<think>\n", "think"), ("<think>\n\n</think>\n\n", "answer")])
def test_what_is_cut_is_filed_as_the_prompt_left_off(load, tmp_path: Path, tail: str, channel: str) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}\n" + tail.replace("\n", "{{ '\\n' }}"))
    llm = load(chat_template=str(tmp_path / "t.jinja"))
    events = list(llm.stream([Request("a", (Message("user", "hello you"),), replace(PARAMS, max_tokens=8))]))
    assert {event.channel for event in events if event.text} == {channel}
    assert events[-1].finish == "length"
    assert events[-1].usage.completion_tokens == 8
