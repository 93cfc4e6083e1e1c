"""minicpm chat on a real terminal, with a fake model: lines that are typed, and what comes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

from spawned import PROMPT, Start, leave, spawn  # noqa: E402

from fake_cli import ANSWERS  # noqa: E402

SHOWN = ANSWERS["paragraphs"].replace("**", "")


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


def answer_to(question: str, child: pexpect.spawn) -> str:
    """What stands between the question and the next prompt, on the screen and above it."""
    return str(child.logfile_read.text.split(f"> {question}\n")[1].split("\n>")[0])


def test_ask_and_leave(run: Start, tmp_path: Path) -> None:
    child = run()
    child.send("hello\r")
    child.expect("You said: hello")
    child.expect(PROMPT)
    assert leave(child) == 0
    history = tmp_path / "data" / "history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    (session,) = (tmp_path / "data" / "sessions").iterdir()
    assert session.stat().st_mode & 0o777 == 0o600


def test_what_is_typed_is_utf8_also_where_python_thinks_that_it_is_ascii(run: Start, tmp_path: Path) -> None:
    child = run(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    child.send("Grüße 世界\r")
    child.expect("You said")
    child.expect(PROMPT)
    assert leave(child) == 0
    (session,) = (tmp_path / "data" / "sessions").glob("*.jsonl")
    assert "Grüße 世界" in session.read_text(encoding="utf-8")


def test_what_is_typed_while_an_answer_comes_waits_for_the_prompt(run: Start) -> None:
    child = run(delay=0.002)
    child.send("paragraphs\r")
    child.expect("paragraph 3 is", timeout=30)
    child.send("ty\x7f\x7fnext\r")
    child.expect("You said: next", timeout=60)
    child.expect(PROMPT)
    assert answer_to("paragraphs", child) == SHOWN
    assert answer_to("next", child) == "You said: next"
    assert leave(child) == 0


def test_multi_line_input(run: Start) -> None:
    child = run("--plain")
    child.send("one\\\rtwo\x1b\rthree\r")
    child.expect("You said: one\r\ntwo\r\nthree")
    child.expect(PROMPT)
    child.send("\x1b[200~four\nfive\x1b[201~\r")
    child.expect("You said: four\r\nfive")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_commands_complete(run: Start) -> None:
    child = run("--plain")
    child.send("/sta\t\r")
    child.expect("context: 4096 of 4096 tokens left")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_wide_characters_and_backspace_in_a_narrow_terminal(run: Start) -> None:
    child = run("--plain", "-q", columns=8)
    child.send("你好世界\x7f\x7f!\r")
    child.expect("You said: 你好!")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_a_conversation_goes_on(run: Start) -> None:
    child = run("--plain")
    child.send("first\r")
    child.expect("You said: first")
    child.expect(PROMPT)
    assert leave(child) == 0
    child = run("--plain", "-c")
    assert re.search("going on with .*: 1 questions? so far", child.logfile_read.text)
    child.send("/undo\r")
    child.expect("took back 1 question; 0 left")
    child.expect(PROMPT)
    assert leave(child) == 0
