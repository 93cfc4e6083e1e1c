"""The budget of thinking, through template, engine and detokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicpm_cli.llm.llm import LLM
from minicpm_cli.types import Message, Request, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"


@pytest.mark.parametrize("least", [0, 30])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_an_answer_begins_when_the_budget_is_used_up(load, tmp_path: Path, budget: int, least: int) -> None:
    """Also of one that has to be of some length."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    llm: LLM = load(chat_template=str(tmp_path / "t.jinja"))
    asked = Request("a", (Message("user", "hello world"),))
    limits = {"max_tokens": 40, "temperature": 0.0, "think_budget": budget, "min_tokens": least}
    events = list(llm.stream([Request("a", asked.messages, SamplingParams(**limits))]))  # type: ignore[arg-type]
    free = list(llm.stream([Request("a", asked.messages, SamplingParams(max_tokens=budget or 1, temperature=0.0))]))
    thought = "".join(event.text for event in events if event.channel == "think")
    if budget:
        whole = "".join(event.text for event in free)
        assert thought.strip() == whole.strip(), "the same tokens as without a budget, as far as it goes"
    else:
        assert thought == ""
    assert "".join(event.text for event in events if event.channel == "answer")
    assert events[-1].finish == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 40
