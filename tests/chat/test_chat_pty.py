"""minicpm chat on a real terminal, with a fake model; what is asserted is the screen and what scrolled off it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulator import Emulator

pexpect = pytest.importorskip("pexpect")

FAKE = str(Path(__file__).parents[1] / "fake_cli.py")
PROMPT = r"\x1b\[\?2004h[^>]*>"  # bracketed paste goes on with every prompt
MANY = "\n".join(f"line {n}" for n in range(1, 101))
PARAGRAPHS = "\n\n".join(f"paragraph {n} is bold" for n in range(1, 61))
Start = Callable[..., "pexpect.spawn"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*arguments, delay=..., rows=..., ...) -> the running program; its `logfile_read` is an Emulator."""
    running = []

    def spawn(
        *arguments: str, delay: float = 0.0, rows: int = 24, columns: int = 80, maxread: int = 2000
    ) -> pexpect.spawn:
        environment = dict(os.environ) | {
            "MINICPM_DATA_DIR": str(tmp_path / "data"),
            "MINICPM_CONFIG": str(tmp_path / "config.toml"),
            "MINICPM_MODEL": "fake",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }
        environment.pop("NO_COLOR", None)
        (tmp_path / "config.toml").touch()
        child = pexpect.spawn(
            sys.executable,
            [FAKE, str(delay), *arguments],
            env=environment,
            dimensions=(rows, columns),
            encoding="utf-8",
            timeout=20,
            maxread=maxread,
        )
        child.logfile_read = Emulator(rows, columns)
        running.append(child)
        return child

    yield spawn
    for child in running:
        child.close(force=True)


def leave(child: pexpect.spawn) -> int:
    child.sendcontrol("d")
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus)


def answer_to(question: str, child: pexpect.spawn) -> str:
    """What stands between the question and the next prompt, on the screen and above it."""
    return str(child.logfile_read.text.split(f"> {question}\n")[1].split("\n>")[0])


def test_ask_and_leave(start: Start, tmp_path: Path) -> None:
    child = start("chat")
    child.expect(PROMPT)
    child.send("hello\r")
    child.expect("You said: hello")
    child.expect(PROMPT)
    assert leave(child) == 0
    history = tmp_path / "data" / "history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    (session,) = (tmp_path / "data" / "sessions").iterdir()
    assert session.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_the_reply_and_twice_leaves(start: Start, tmp_path: Path) -> None:
    child = start("chat", "--plain", "--session", "s", delay=0.05)
    child.expect(PROMPT)
    child.send("many\r")
    child.expect("line 3")
    child.sendintr()
    child.expect("kept as a partial reply")
    child.expect(PROMPT)
    child.send("still there?\r")
    child.expect("You said: still there")
    child.expect(PROMPT)
    child.sendintr()
    child.expect("Ctrl-C again")
    child.expect(PROMPT)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    stored = (tmp_path / "data" / "sessions" / "s.jsonl").read_text()
    assert stored.count('"partial": true') == 1


@pytest.mark.parametrize("maxread", [4096, 7])
@pytest.mark.parametrize("question", ["many", "paragraphs"])
def test_a_long_answer_stands_in_the_scrollback_once(start: Start, question: str, maxread: int) -> None:
    """Also for a reader so slow that the program waits for it; "many" is one block of a hundred lines."""
    child = start("chat", rows=6, maxread=maxread)
    child.expect(PROMPT)
    child.send(f"{question}\r")
    child.expect(PROMPT, timeout=60)
    assert answer_to(question, child) == (MANY if question == "many" else PARAGRAPHS)
    assert leave(child) == 0


def test_the_window_may_change_while_an_answer_comes(start: Start) -> None:
    child = start("chat", delay=0.002)
    child.expect(PROMPT)
    child.send("paragraphs\r")
    for place, rows, columns in ((10, 9, 40), (20, 30, 100), (30, 5, 30)):
        child.expect(f"paragraph {place} is", timeout=30)
        child.setwinsize(rows, columns)
        child.logfile_read.resize(rows, columns)
    child.expect(PROMPT, timeout=60)
    assert answer_to("paragraphs", child) == PARAGRAPHS
    assert leave(child) == 0


def test_what_is_typed_while_an_answer_comes_waits_for_the_prompt(start: Start) -> None:
    child = start("chat", delay=0.002)
    child.expect(PROMPT)
    child.send("paragraphs\r")
    child.expect("paragraph 3 is", timeout=30)
    child.send("ty\x7f\x7fnext\r")
    child.expect("You said: next", timeout=60)
    child.expect(PROMPT)
    assert answer_to("paragraphs", child) == PARAGRAPHS
    assert answer_to("next", child) == "You said: next"
    assert leave(child) == 0


@pytest.mark.parametrize("close", [True, False], ids=["closed", "SIGTERM"])
def test_a_terminal_that_is_closed_loses_nothing(start: Start, tmp_path: Path, close: bool) -> None:
    child = start("chat", "--session", "s", delay=0.02)
    child.expect(PROMPT)
    child.send("many\r")
    child.expect("line 3", timeout=30)
    if close:
        child.ptyproc.fileobj.close()
    else:
        child.kill(signal.SIGTERM)
        child.expect(pexpect.EOF)
    child.wait()
    question, answer = map(json.loads, (tmp_path / "data" / "sessions" / "s.jsonl").read_text().splitlines())
    assert question["content"] == "many"
    assert answer["partial"]
    assert answer["content"].startswith("line 1\nline 2\nline 3")


def test_multi_line_input(start: Start) -> None:
    child = start("chat", "--plain")
    child.expect(PROMPT)
    child.send("one\\\rtwo\x1b\rthree\r")
    child.expect("You said: one\r\ntwo\r\nthree")
    child.expect(PROMPT)
    child.send("\x1b[200~four\nfive\x1b[201~\r")
    child.expect("You said: four\r\nfive")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_commands_complete(start: Start) -> None:
    child = start("chat", "--plain")
    child.expect(PROMPT)
    child.send("/sta\t\r")
    child.expect("context: 4096 of 4096 tokens left")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_wide_characters_and_backspace_in_a_narrow_terminal(start: Start) -> None:
    child = start("chat", "--plain", "-q", columns=8)
    child.expect(PROMPT)
    child.send("你好世界\x7f\x7f!\r")
    child.expect("You said: 你好!")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_a_conversation_goes_on(start: Start) -> None:
    child = start("chat", "--plain")
    child.expect(PROMPT)
    child.send("first\r")
    child.expect("You said: first")
    child.expect(PROMPT)
    assert leave(child) == 0
    child = start("chat", "--plain", "-c")
    child.expect("1 questions? so far")
    child.expect(PROMPT)
    child.send("/undo\r")
    child.expect("took back 1 question; 0 left")
    child.expect(PROMPT)
    assert leave(child) == 0
