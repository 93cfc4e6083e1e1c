"""Ctrl-C, SIGTERM and a closed terminal at any time: what came is kept, and on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pexpect = pytest.importorskip("pexpect")

from spawned import PROMPT, Start, ask, leave, spawn  # noqa: E402

from fake_cli import ANSWERS, THOUGHT  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """run(*arguments, delay=...) -> the program, with the session s."""
    running = []

    def start(*arguments: str, delay: float = 0.0) -> pexpect.spawn:
        child = spawn(tmp_path, "chat", "--session", "s", *arguments, delay=delay)
        running.append(child)
        return child

    yield start
    for child in running:
        child.close(force=True)


def stored(folder: Path) -> list[dict[str, Any]]:
    path = folder / "data" / "sessions" / "s.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended(child: pexpect.spawn) -> int:
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus)


def test_ctrl_c_while_the_model_is_loaded(run: Start, tmp_path: Path) -> None:
    child = run("-m", "heavy")
    child.expect(r"\[loading\]")
    child.send("typed ahead")
    child.sendintr()
    assert ended(child) == 130
    assert child.logfile_read.screen[:2] == ["[loading]minicpm: interrupted", ""]
    assert stored(tmp_path) == []


def test_ctrl_c_while_the_prompt_is_read(run: Start, tmp_path: Path) -> None:
    child = run()
    child.expect(PROMPT)
    ask(child, "one", "You said: one")
    child.send("read\r")
    child.expect(r"\[reading\]")
    child.sendintr()
    child.expect("stopped before the first word; the question is taken back")
    child.expect(PROMPT)
    assert [turn["content"] for turn in stored(tmp_path)] == ["one", "You said: one"]
    ask(child, "two", "You said: two")
    assert leave(child) == 0


def test_ctrl_c_while_it_thinks(run: Start, tmp_path: Path) -> None:
    child = run(delay=0.02)
    child.expect(PROMPT)
    child.send("think\r")
    child.expect(r"[ m]3\D")
    child.sendintr()
    child.expect("kept as a partial reply")
    child.expect(PROMPT)
    turn = stored(tmp_path)[-1]
    assert turn["partial"]
    assert turn["content"] == ""
    assert THOUGHT.startswith(turn["reasoning"])
    ask(child, "two", "You said: two")
    assert leave(child) == 0


def test_ctrl_c_while_it_answers(run: Start, tmp_path: Path) -> None:
    child = run(delay=0.02)
    child.expect(PROMPT)
    child.send("many\r")
    child.expect("line 3")
    child.sendintr()
    child.expect("kept as a partial reply")
    child.expect(PROMPT)
    turn = stored(tmp_path)[-1]
    assert turn["partial"]
    assert ANSWERS["many"].startswith(turn["content"])
    ask(child, "two", "You said: two")
    assert not stored(tmp_path)[-1].get("partial")
    assert leave(child) == 0


def test_ctrl_c_twice_at_an_empty_prompt_leaves(run: Start) -> None:
    child = run()
    child.expect(PROMPT)
    child.sendintr()
    child.expect("Ctrl-C again")
    child.expect(PROMPT)
    ask(child, "one", "You said: one")
    child.sendintr()
    child.expect("Ctrl-C again")
    child.expect(PROMPT)
    child.sendintr()
    assert ended(child) == 130


def test_ctrl_c_takes_back_what_was_typed(run: Start, tmp_path: Path) -> None:
    child = run()
    child.expect(PROMPT)
    child.send("draft")
    child.expect("draft")
    child.sendintr()
    child.sendintr()
    child.expect("Ctrl-C again")
    child.expect(PROMPT)
    ask(child, "\x1b[A, later", "You said: draft, later")
    assert leave(child) == 0
    assert stored(tmp_path)[0]["content"] == "draft, later"


@pytest.mark.parametrize("question", ["many", "think"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "SIGTERM"])
def test_a_terminal_that_is_closed_loses_nothing(run: Start, tmp_path: Path, close: bool, question: str) -> None:
    child = run(delay=0.02)
    child.expect(PROMPT)
    child.send(f"{question}\r")
    child.expect("line 3" if question == "many" else r"[ m]3\D")
    if close:
        child.ptyproc.fileobj.close()
        child.wait()
    else:
        child.kill(signal.SIGTERM)
        assert ended(child) == 128 + signal.SIGTERM
    asked, answer = stored(tmp_path)
    assert asked["content"] == question
    assert answer["partial"]
    text = answer["content"] if question == "many" else answer["reasoning"]
    assert text.split()[:6] == [*(ANSWERS | {"think": THOUGHT})[question].split()][:6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_leaves_the_terminal_as_it_was(run: Start, number: int) -> None:
    child = run()
    child.expect(PROMPT)
    terminal = os.open(os.readlink(f"/proc/{child.pid}/fd/0"), os.O_RDWR | os.O_NOCTTY)
    child.send("draft")
    child.expect("draft")
    assert not termios.tcgetattr(terminal)[3] & termios.ICANON, "keys come one by one"
    child.kill(number)
    child.expect(r"\x1b\[\?2004l")  # no bracketed paste any more
    child.wait()
    flags = termios.tcgetattr(terminal)[3]
    os.close(terminal)
    assert child.exitstatus == 128 + number
    assert flags & termios.ECHO
    assert flags & termios.ICANON


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_whenever_it_is_killed_what_was_seen_is_on_disk(run: Start, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    child = run(delay=0.002)
    child.expect(PROMPT)
    ask(child, "one", "You said: one")
    child.send("many\r")
    time.sleep(chance.uniform(0, 0.6))
    child.kill(chance.choice([signal.SIGTERM, signal.SIGHUP]))
    child.expect(pexpect.EOF)
    child.close()
    turns = stored(tmp_path)
    assert [turn["content"] for turn in turns[:2]] == ["one", "You said: one"]
    seen = child.logfile_read.text.split("> many\n")[-1] if "> many\n" in child.logfile_read.text else ""
    kept = turns[-1]["content"] if len(turns) == 4 else ""
    assert ANSWERS["many"].startswith(kept)
    lines = [line for line in seen.split("\n") if line.startswith("line ")]
    assert kept.split("\n")[: len(lines)] == lines or "\n".join(lines) == kept[: len("\n".join(lines))]
