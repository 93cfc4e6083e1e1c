"""A model that says the same over and over is stopped; one that counts, draws a rule or fills a table is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talks import Make, stored, told

from fakes import FakeLLM
from minicpm_cli.chat import commands
from minicpm_cli.chat.loops import Loop, LoopWatch, repeated

ROUND = "The river runs to the sea. "
ENOUGH = 40  # times that ROUND is surely too often


def heard(text: str, step: int = 4) -> tuple[Loop | None, int]:
    """What was noticed, and after how many characters."""
    watch = LoopWatch()
    for end in range(step, len(text) + step, step):
        loop = watch.hear(text[end - step : end])
        if loop:
            return loop, end
    return None, len(text)


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "ha ",
        ROUND,
        "河水流入大海。",
        "".join(f"w{n} " for n in range(200)) + "end\n",
        "\n",
        "🌊",
        "- item\n- thing\n\n",
    ],
)
@pytest.mark.parametrize("before", ["", "Once upon a time, " * 3])
def test_what_repeats_is_noticed_soon(unit: str, before: str) -> None:
    loop, end = heard(before + unit * 1000)
    assert loop is not None
    assert loop.text.strip() == unit.strip()
    assert loop.times >= 5
    assert end <= len(before) + max(600, 5 * len(unit)) + 250


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"line {n}" for n in range(1000)),
        "\n".join(f"{n}. Buy milk." for n in range(1000)),
        "-" * 400 + "\n" + "=" * 400,
        "| a | b |\n|---|---|\n" + "\n".join(f"| {n} | x |" for n in range(500)),
        "[" + ", ".join(["0"] * 150) + "]",
        "word " * 100 + "end. " + "word " * 100 + "End. ",
        (ROUND * 15 + "\n\n") * 2,
    ],
)
def test_what_a_person_may_want_is_not(text: str) -> None:
    assert heard(text)[0] is None


@given(st.binary(min_size=1, max_size=30), st.binary(max_size=50), st.integers(0, 30))
def test_any_end_that_is_long_and_often_enough_is_found(unit: bytes, before: bytes, more: int) -> None:
    times = max(600, 5 * len(unit)) // len(unit) + 2
    found = repeated(before + unit * times + unit[: more % len(unit)])
    assert found is not None
    assert found.times >= times


def test_a_reply_that_goes_in_circles_is_stopped_kept_and_said(make: Make) -> None:
    llm = FakeLLM(answer=lambda request: "Well. " + ROUND * ENOUGH)
    chat = make(llm)
    chat.say("one")
    said = told(chat)
    assert 'goes in circles ("The river runs to the sea." came' in said
    turn = chat.conversation.turns[-1]
    assert turn.partial
    assert 600 <= len(turn.message.content) <= 900
    assert llm.aborted == ["chat"]
    assert not chat.stopped, "the user did not: a pipe goes on with its next line"
    assert stored(chat)[-1].partial


def test_thinking_in_circles_is_stopped_too(make: Make) -> None:
    chat = make(FakeLLM(thought=lambda request: "Hm. " * 1000))
    chat.say("one")
    assert len(chat.conversation.turns[-1].message.reasoning or "") < 1000
    assert "goes in circles" in told(chat)


def test_who_wants_circles_gets_them(make: Make) -> None:
    chat = make(FakeLLM(answer=lambda request: ROUND * ENOUGH))
    commands.run(chat, "/set loops ignore")
    chat.say("one")
    assert chat.conversation.turns[-1].message.content == ROUND * ENOUGH
    assert not chat.conversation.turns[-1].partial
