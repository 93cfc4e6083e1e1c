"""Where an answer ends: at the model's own token, or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("tail", "channel"), [("<think>\n", "think"), ("<think>\n\n</think>\n\n", "answer")])
def test_what_is_cut_is_filed_as_the_prompt_left_off(load, tmp_path: Path, tail: str, channel: str) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}\n" + tail.replace("\n", "{{ '\\n' }}"))
    llm = load(chat_template=str(tmp_path / "t.jinja"))
    events = list(llm.stream([Request("a", (Message("user", "hello you"),), replace(PARAMS, max_tokens=8))]))
    assert {event.channel for event in events if event.text} == {channel}
    assert events[-1].finish == "length"
    assert events[-1].usage.completion_tokens == 8
