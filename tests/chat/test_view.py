"""Markdown while it comes, on a terminal that remembers what scrolled off it: every row stands there once."""

from __future__ import annotations

import re
import threading
import time

import pytest
from emulator import Emulator
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.view import Awaited, MarkdownView
from minicpm_cli.chat.waiting import Waiting

ANSWERS = {
    "lines": "\n".join(f"line {n}" for n in range(1, 301)),
    "list": "\n".join(f"- line {n} **is** bold" for n in range(1, 301)),
    "numbers": "\n\n".join(f"{n}. line {n}\n   and `more` of it" for n in range(1, 301)),
    "code": "Here:\n```python\n" + "\n".join(f"x = 'line {n}'" for n in range(1, 301)) + "\n```\nDone.",
    "open fence": "~~~\n" + "\n".join(f"line {n}" for n in range(1, 301)),
    "table": "| a | b |\n|---|---|\n" + "\n".join(f"| line {n} | x |" for n in range(1, 301)),
    "paragraphs": "\n\n".join(f"line {n} " + "字 " * 50 for n in range(1, 301)),
}


class Shown:
    """An answer shown `pieces` characters at a time; a second passes after each, enough to draw, or none."""

    def __init__(self, terminal: Emulator, seconds: float = 1.0) -> None:
        self.terminal, self.now, self._seconds = terminal, 0.0, seconds
        self.view = MarkdownView(Terminal(terminal, terminal), size=terminal.size, clock=lambda: self.now)

    def feed(self, text: str, pieces: int) -> Shown:
        for start in range(0, len(text), pieces):
            self.now += self._seconds
            self.view.show("answer", text[start : start + pieces])
        return self

    def end(self) -> str:
        self.view.end()
        return self.terminal.text


def at_once(text: str, rows: int = 24, columns: int = 80) -> str:
    """What stands there when nothing is drawn before its time."""
    return Shown(Emulator(rows, columns), seconds=0).feed(text, len(text) or 1).end()


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"line ?(\d+)", text)]


@pytest.mark.parametrize("rows", [24, 6])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_long_answer_stands_in_the_scrollback_once(name: str, rows: int) -> None:
    text = ANSWERS[name]
    shown = Shown(Emulator(rows)).feed(text, len(text) // 41).end()
    assert numbers(shown) == list(range(1, 301))
    assert shown == at_once(text, rows)


SIZES = [(24, 80), (6, 80), (50, 120), (12, 30), (24, 80), (5, 22), (30, 100), (3, 21), (24, 80)]  # rows, columns


@pytest.mark.parametrize("name", ANSWERS)
def test_a_window_that_changes_repeats_and_loses_nothing(name: str) -> None:
    """The terminal wraps its lines anew, as most do; eight sizes, in the middle of a word, a mark, a row of cells."""
    text, terminal = ANSWERS[name], Emulator(24, 80, reflow=True)
    shown, part = Shown(terminal), len(text) // len(SIZES)
    for place, size in enumerate(SIZES):
        terminal.resize(*size)
        shown.feed(text[place * part : (place + 1) * part], max(7, len(text) // 400))
    shown.feed(text[len(SIZES) * part :], 7).end()
    assert numbers(re.sub(r"\s", "", terminal.lines)) == list(range(1, 301))


@pytest.mark.parametrize("name", ANSWERS)
def test_a_window_that_cuts_its_rows_repeats_nothing(name: str) -> None:
    """As xterm does: what stands beyond the right edge is gone."""
    text, terminal = ANSWERS[name], Emulator(24, 80)
    shown, part = Shown(terminal), len(text) // len(SIZES)
    for place, size in enumerate(SIZES):
        terminal.resize(*size)
        shown.feed(text[place * part : (place + 1) * part], max(7, len(text) // 400))
    shown.feed(text[len(SIZES) * part :], 7).end()
    found = numbers(terminal.text)
    assert found == sorted(set(found))
    assert len(found) >= 290


@pytest.mark.parametrize("columns", [120, 100, 60])
def test_a_window_that_changes_behind_a_long_word_halves_no_other(columns: int) -> None:
    """Where the terminal puts the cursor then depends on how it wraps the long one."""
    terminal = Emulator(24, 80, reflow=True)
    shown = Shown(terminal).feed("a" * 100 + " ", 101)
    terminal.resize(24, columns)
    rows = shown.feed("b" * 50 + " c d", 7).end().split("\n")
    assert sum("b" * 50 in row for row in rows) == 1


WORD = [
    "**w%d x**",
    "w%d",
    "`w%d`",
    "*w%d*",
    "\n",
    "\n\n",
    "\n- w%d",
    "\n1. w%d",
    "\n> w%d",
    "\n# w%d\n",
    "**w%d",
    "[w%d](u)",
]
WORD += ["\n```\nw%d = 1\n", "\n```\n", "\n| w%d | w%d |\n|-|-|\n", "\n| w%d | w%d |\n", "中文w%d中文，", "w%d👨‍👩‍👧"]


TEXTS = st.lists(st.sampled_from(WORD), max_size=50)
CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(2, 30), st.integers(20, 90)), max_size=8)


@settings(deadline=None, max_examples=60)
@given(TEXTS, CHANGES, st.integers(1, 9))
def test_no_window_and_no_text_makes_a_word_stand_twice(
    parts: list[str], changes: list[tuple[int, int, int]], step: int
) -> None:
    stands_once(parts, changes, step)


@pytest.mark.slow
@settings(deadline=None, max_examples=5000)
@given(TEXTS, CHANGES, st.integers(1, 9))
def test_no_window_and_no_text_in_a_long_search(
    parts: list[str], changes: list[tuple[int, int, int]], step: int
) -> None:
    stands_once(parts, changes, step)


def stands_once(parts: list[str], changes: list[tuple[int, int, int]], step: int) -> None:
    count = iter(range(1000, 2000))
    text = " ".join(re.sub("%d", lambda _: str(next(count)), part) for part in parts)
    terminal = Emulator(24, 80, reflow=True)
    shown, before = Shown(terminal), 0
    for place, rows, columns in sorted(changes):
        shown.feed(text[before:place], step)
        before = max(before, place)
        terminal.resize(rows, columns)
    shown.feed(text[before:], step).end()
    said = re.findall(r"w\d{4}", text)
    assert re.findall(r"w\d{4}", re.sub(r"[\s▌]+", "", terminal.lines)) == said


@pytest.mark.parametrize("name", ANSWERS)
def test_the_newest_words_are_seen_as_they_come(name: str) -> None:
    text, terminal = ANSWERS[name], Emulator(24, 80)
    place = text.index("\n", text.index("line 200")) + 1
    shown = Shown(terminal).feed(text[:place], place // 10)
    assert "line 200" in "\n".join(terminal.screen)
    assert not terminal.cursor_hidden
    assert numbers(shown.end()) == list(range(1, 201))


def test_what_is_finished_is_not_written_again() -> None:
    text, terminal = ANSWERS["code"], Emulator(24, 80)
    shown = Shown(terminal).feed(text, 40)
    frame = terminal.written
    shown.feed("\n\nx", 3)
    assert terminal.written - frame < 30


def test_nothing_moves_the_cursor_up_or_hides_it() -> None:
    """Only the end of a row is ever erased."""
    codes: set[str] = set()

    class Listening(Emulator):
        def write(self, text: str) -> int:
            codes.update(re.findall(r"\x1b[^\x1b]*?[A-Za-z]", text))
            return super().write(text)

    terminal = Listening(10, 40)
    Shown(terminal).feed("\n\n".join([ANSWERS["table"][:900], ANSWERS["code"][:900]]), 37).end()
    assert {code[-1] for code in codes} == {"D", "K", "m"}


WORDS = ["a", "**b**", "`c`", "*", "_", "```", "~~~", "- ", "1. ", "12) ", "# ", "> ", "| a |", "|---|", "---", "<b>"]
SPACES = [
    " ",
    "\n",
    "\n\n",
    "\n  ",
    "\n   ",
    "\n    ",
    "\t",
    "long words that wrap ",
    "你好",
    "👨‍👩‍👧",
    "e\u0301",
    "\x1b[2J",
]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(WORDS + SPACES), max_size=60).map("".join), st.integers(1, 9), st.integers(2, 9))
def test_what_stands_in_the_end_does_not_depend_on_when_it_was_drawn(text: str, pieces: int, rows: int) -> None:
    assert Shown(Emulator(rows, 20)).feed(text, pieces).end() == at_once(text, rows, 20)


@pytest.mark.parametrize(
    "text",
    [
        "a vector<int> and <b>tags</b>",
        "<details>\nopen\n</details>",
        "text[1]\n\n[1]: https://example.com",
        "roses\nare red",
        "[brackets] :smile: {x}",
    ],
)
def test_nothing_that_was_written_is_left_out(text: str) -> None:
    assert at_once(text).split() == text.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", "␛[2J␇"),
        ("```\n\x1b[2J\r\n```", "␛[2J␍"),
        ("&#x202e;&#13;x", "<U+202E>␍x"),
        ("`\x9b2J`", "<U+009B>2J"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert at_once(text).strip() == shown


def test_lists_keep_their_shape() -> None:
    text = "1. One:\n\n   ```sh\n   ls\n\n   pwd\n   ```\n\n2. Two\n    - sub\n\n      more\n10. Ten\n\nEnd"
    rows = [row for row in at_once(text).split("\n") if row]
    assert rows == [
        " 1. One:",
        "     sh",
        "     ls",
        "     pwd",
        " 2. Two",
        "     • sub",
        "       more",
        " 10. Ten",
        "End",
    ]


@pytest.mark.parametrize("pieces", [1, 99])
def test_wide_characters_take_two_columns(pieces: int) -> None:
    """So rows end where a list says, before none of the marks that never begin one, and none is halved."""
    shown = Shown(Emulator(24, 12)).feed("- 你好世界你好，世界。\n\n한국어 한국어 x", pieces).end()
    assert shown.split("\n") == [" • 你好世界", "   你好，世", "   界。", "", "한국어", "한국어 x"]


@pytest.mark.parametrize(
    ("fence", "shown"),
    [
        ("```rust", "rust"),
        ("```", None),
        ("~~~ c++ x", "c++"),
        ("```" + "a" * 99, "a" * 38),
        ("```p\x1b[2Jy", "p␛[2Jy"),
    ],
)
def test_code_says_its_language(fence: str, shown: str | None) -> None:
    rows = at_once(f"{fence}\nx = 1\n{fence[:3]}", 24, 40).split("\n")
    assert rows == [*([f"  {shown}"] if shown else []), "  x = 1"]


def test_drawing_takes_a_fifth_of_the_time_where_the_terminal_is_slow() -> None:
    shown = Shown(Emulator())

    class Slow(Emulator):
        def write(self, text: str) -> int:
            shown.now += 2.0
            return super().write(text)

    slow = Slow()
    shown = Shown(slow, seconds=0.1)
    shown.feed("word " * 500, 5)
    generating = 500 * 0.1
    assert 0 < shown.now - generating <= generating / 4 + 4 * 2.0
    assert shown.end().split() == ["word"] * 500


def test_thinking_stands_apart() -> None:
    terminal = Emulator()
    shown = Shown(terminal)
    shown.view.show("think", "Hm.")
    shown.feed("It **is", 2)
    shown.view.show("think", "Sure?")
    shown.feed(" so**.", 2)
    assert shown.end().split("\n") == ["Hm.", "It", "Sure?", "is so."]


def test_columns_in_the_environment_do_not_hide_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = "word " * 60
    assert Shown(Emulator(24, 40)).feed(text, 5).end() == at_once(text, 24, 40)
    assert max(map(len, at_once(text, 24, 40).split("\n"))) <= 40


@pytest.mark.parametrize("quiet", [False, True])
def test_a_reply_that_takes_its_time_is_waited_for_aloud(quiet: bool) -> None:
    terminal = Emulator()
    streams = Terminal(terminal, terminal, quiet=quiet)
    view = Awaited(MarkdownView(streams, size=terminal.size), Waiting(streams, seconds=0.01))
    deadline = time.monotonic() + (0.1 if quiet else 10)
    while not terminal.text and time.monotonic() < deadline:
        time.sleep(0.005)
    assert terminal.text == ("" if quiet else "reading: 0 s")
    view.show("answer", "")
    view.show("answer", "It is so.\n")
    view.end()
    assert terminal.text == "It is so."
    assert "waiting" not in {thread.name for thread in threading.enumerate()}
