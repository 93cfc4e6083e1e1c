"""The line below the prompt: what it says, and that it never takes a second row."""

from __future__ import annotations

import pytest
from prompt_toolkit.utils import get_cwidth
from talks import Make

from fakes import FakeLLM
from minicpm_cli.chat.toolbar import Toolbar, fitting


def test_the_parts(make: Make) -> None:
    chat = make(FakeLLM(context=40))
    toolbar = Toolbar(chat)
    assert toolbar.parts() == ["fake bf16", "0 of 40 tokens (0%)", "test"]
    chat.say("one two three four")
    assert toolbar.parts() == ["fake bf16", "12 of 40 tokens (30%)", "10.0 tok/s", "test"]
    chat.attached.append(("a", "b"))
    assert "1 file attached" in toolbar.parts()
    chat.conversation.undo()
    assert toolbar.parts()[1] == "0 of 40 tokens (0%)"


def test_tokens_are_not_counted_with_every_key(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    chat = make(llm)
    chat.say("one")
    toolbar, counted = Toolbar(chat), []
    monkeypatch.setattr(FakeLLM, "prompt", lambda self, request: counted.append(request) or [1])
    for _ in range(5):
        toolbar.parts()
    assert len(counted) == 1


def test_a_narrow_row_holds_the_first_parts() -> None:
    parts = ["模型 Q4_1", "12 of 40 tokens (30%)", "4.0 tok/s", "session"]
    for columns in range(80):
        row = fitting(parts, columns)
        assert get_cwidth(row) <= columns
        assert columns < 11 or row.startswith(" 模型 Q4_1")
        assert (columns < 56) == (not row.endswith("session"))


def test_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in fitting(["a\x1b[2Jb"], 40)
