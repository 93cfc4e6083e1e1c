"""An answer in a real terminal, with a fake model: whole screens, and what scrolled off them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

from emulator import Emulator  # noqa: E402
from spawned import PROMPT, Start, ask, leave, spawn  # noqa: E402

from fake_cli import ANSWERS, THOUGHT  # noqa: E402

SIZES = [(9, 40), (30, 100), (5, 30), (24, 80), (4, 22), (24, 80)]  # rows, columns


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """run(*arguments, delay=..., rows=..., ...) -> the program at its first prompt."""
    running = []

    def start(*arguments: str, **options: object) -> pexpect.spawn:
        child = spawn(tmp_path, "chat", *arguments, **options)  # type: ignore[arg-type]
        running.append(child)
        child.expect(PROMPT)
        return child

    yield start
    for child in running:
        child.close(force=True)


def answer_to(question: str, text: str) -> str:
    """What stands between the question and the next prompt."""
    return text.split(f"> {question}\n")[1].split("\n>")[0]


def windows_change(child: pexpect.spawn, words: list[str]) -> None:
    """Each of SIZES once, when the next of `words` is there."""
    for word, (rows, columns) in zip(words, SIZES, strict=True):
        child.expect(word)
        child.setwinsize(rows, columns)
        child.logfile_read.resize(rows, columns)


@pytest.mark.parametrize(("question", "maxread"), [("many", 4096), ("paragraphs", 7)])
def test_a_long_answer_stands_in_the_scrollback_once(run: Start, question: str, maxread: int) -> None:
    """Also for a reader so slow that the program waits for it."""
    child = run(rows=6)
    child.maxread = maxread
    ask(child, question)
    assert answer_to(question, child.logfile_read.text) == ANSWERS[question].replace("**", "")
    assert leave(child) == 0


@pytest.mark.parametrize(
    ("question", "word"), [("paragraphs", "paragraph {} "), ("table", "row {}\r"), ("program", r"= \x1b.*{}")]
)
def test_the_window_may_change_while_an_answer_comes(run: Start, question: str, word: str) -> None:
    """Taller than any of the windows; wherever the program is when it hears of a change."""
    child = run(delay=0.001)
    child.logfile_read = Emulator(24, 80, reflow=True)
    child.send(f"{question}\r")
    windows_change(child, [word.format(n) for n in (12, 20, 27, 35, 41, 50)])
    child.expect(PROMPT)
    shown = re.findall(r"\d+", answer_to(question, child.logfile_read.lines))
    assert "".join(shown) == "".join(re.findall(r"\d+", ANSWERS[question]))


def test_thinking_while_the_window_changes(run: Start) -> None:
    child = run(delay=0.001)
    child.logfile_read = Emulator(24, 80, reflow=True)
    child.send("think\r")
    windows_change(child, [rf"[ m]{n}\D" for n in (12, 20, 27, 35, 41, 50)])
    child.expect(PROMPT)
    shown = answer_to("think", child.logfile_read.lines)
    assert "".join(shown.split()) == "".join(THOUGHT.split()) + "Yousaid:think"


def test_the_whole_screen_of_an_answer(run: Start) -> None:
    child = run("-q", rows=14, columns=36)
    ask(child, "wide")
    ask(child, "code")
    assert child.logfile_read.screen[:13] == [
        "> wide",
        "你好，世界！这是一个很长的句子，看看",
        "它在哪里换行。",
        "",
        " • é é 👍🏽 한국어",
        " • x 👨👩👧",
        "> code",
        "Here:",
        "",
        "  python",
        "  print(1)",
        "",
        "Done.",
    ]


def test_what_a_model_writes_is_not_obeyed(run: Start) -> None:
    child = run("-q")
    ask(child, "nasty")
    nasty = "a␛[2J␛]0;owned␇b<U+009B>31mc<U+202E>d␈␡␍e"
    assert child.logfile_read.screen[:9] == [
        "> nasty",
        nasty,
        nasty,
        "",
        f"  {nasty}",
        "",
        nasty,
        "─" * len(nasty),
        nasty,
    ]


def test_circles_are_broken(run: Start) -> None:
    child = run()
    ask(child, "circles", "goes in circles")
    text = child.logfile_read.text
    assert 20 < text.count("goes.") < 60
    assert '("Round and round it goes." came' in re.sub(r"\n", " ", text)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}], ids=["NO_COLOR", "dumb", "plain"])
def test_wishes_for_less_are_respected(tmp_path: Path, variables: dict[str, str]) -> None:
    options = [] if variables else ["--plain"]
    child = spawn(tmp_path, "chat", "-q", *options, **variables)
    child.expect(">")
    child.send("code\r")
    child.expect("Done.")
    written = child.before
    if "NO_COLOR" in variables:
        assert not re.search(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9\d|10\d)(?:;[\d;]*)?m", written)
        assert "```" not in written.split("Here:")[1]
    else:
        assert "```python" in written
        assert "\x1b" not in written.split("Here:")[1]
    child.close(force=True)
