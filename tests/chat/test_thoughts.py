"""What a model thinks: dimmed, folded, on a screen whose window changes."""

from __future__ import annotations

import io

import pytest
from emulator import Emulator
from talks import Make, told

from fakes import FakeLLM
from minicpm_cli.chat import commands
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.view import MarkdownView, PlainView
from minicpm_cli.errors import UsageError

WORDS = " ".join(f"word{n}" for n in range(200))


class Recorder(Emulator):
    def __init__(self, rows: int = 24, columns: int = 80, *, reflow: bool = False) -> None:
        super().__init__(rows, columns, reflow=reflow)
        self.raw = ""

    def write(self, text: str) -> int:
        self.raw += text
        return super().write(text)


class Shown:
    def __init__(self, terminal: Emulator, *, folded: bool = False, color: bool = True) -> None:
        self.now = 0.0
        self.terminal = terminal
        streams = Terminal(terminal, terminal, color=color, folded=folded)
        self.view = MarkdownView(streams, size=terminal.size, clock=lambda: self.now)

    def think(self, text: str, step: int = 3) -> Shown:
        for start in range(0, len(text), step):
            self.now += 0.1
            self.view.show("think", text[start : start + step])
        return self

    def answer(self, text: str) -> str:
        self.view.show("answer", text)
        self.view.end()
        return self.terminal.text


@pytest.mark.parametrize("color", [True, False])
def test_thinking_is_dimmed_and_ends_rows_between_words(color: bool) -> None:
    terminal = Recorder(24, 20)
    text = Shown(terminal, color=color).think("Let me see what it is.\n\n  - a\n").answer("It is **so**.")
    assert text.split("\n") == ["Let me see what it", "is.", "", "  - a", "It is so."]
    assert "\x1b[2mLet\x1b[0m" in terminal.raw, "dim is no colour"
    assert "\x1b[2mIt" not in terminal.raw


def test_thinking_is_not_markdown_and_is_not_obeyed() -> None:
    text = Shown(Emulator()).think("**a** `b` \x1b[2J\x07\x9b2J\u202e\n# c\n").answer("d")
    assert text.split("\n") == ["**a** `b` ␛[2J␇<U+009B>2J<U+202E>", "# c", "d"]


def test_a_window_that_changes_repeats_nothing() -> None:
    terminal = Emulator(24, 80, reflow=True)
    shown = Shown(terminal)
    for start, size in zip(
        range(0, 1400, 200), [(24, 80), (5, 20), (40, 100), (3, 30), (24, 80), (9, 15), (24, 80)], strict=True
    ):
        terminal.resize(*size)
        shown.think(WORDS[start : start + 200])
    shown.think(WORDS[1400:])
    shown.answer("Done.")
    assert "".join(terminal.lines.split()) == "".join(WORDS.split()) + "Done."


def test_folded_thinking_is_counted_and_summed_up() -> None:
    terminal = Emulator()
    shown = Shown(terminal, folded=True).think("one two 三四 five")
    assert terminal.screen[0].startswith("thinking: ")
    assert shown.answer("It is so.").split("\n") == [
        "minicpm: thought for 0.4 s, 5 words (/think show)",
        "It is so.",
    ]


def test_what_is_folded_can_be_seen_later(make: Make) -> None:
    chat = make(FakeLLM(thought=lambda request: "Let me see."))
    commands.run(chat, "/think hide")
    assert told(chat) == "thinking: as the template has it, folded\n"
    chat.say("one")
    shown = told(chat)
    assert "thought for" in shown
    assert "3 words" in shown
    assert "Let me see." not in shown
    commands.run(chat, "/think show")
    assert told(chat) == "Let me see.\nthinking: as the template has it, shown\n"
    chat.say("two")
    assert told(chat) == "Let me see.\n"
    with pytest.raises(UsageError, match="takes on, off, default, show, hide"):
        commands.run(chat, "/think maybe")


def test_plain_thinking_is_as_it_comes() -> None:
    out, err = io.StringIO(), Recorder(24, 20)
    view = PlainView(Terminal(out, err, plain=True))
    view.show("think", "Let me see what it is, ")
    view.show("think", "\x1b[2Jthen.")
    view.show("answer", "So.")
    view.end()
    assert err.raw == "Let me see what it is, ␛[2Jthen.\n"
    assert out.getvalue() == "So.\n"
