"""What is said on stderr fits the window it is said in, and is one line elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from minicpm_cli.chat.terminal import Terminal

SAID = "no GPU can be used, so this runs on the CPU: torch 2.13.0+cpu is a CPU build, and no NVIDIA driver answers"


def shown(text: str, columns: int) -> list[str]:
    """The lines that a terminal of so many columns gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w", encoding="utf-8") as err:
        Terminal(io.StringIO(), err).line(text)
        got = os.read(ours, 65536).decode()
    os.close(ours)
    assert got.endswith("\r\n")
    return got[:-2].split("\r\n")


@pytest.mark.parametrize("columns", [20, 40, 79])
def test_a_long_line_is_broken_between_words(columns: int) -> None:
    lines = shown(SAID, columns)
    assert len(lines) > 1
    assert all(len(line) <= columns for line in lines)
    assert " ".join(lines) == SAID


def test_wide_characters_count_twice() -> None:
    lines = shown("世界" * 30, 30)
    assert "".join(lines) == "世界" * 30
    assert {len(line) for line in lines} == {15}


@pytest.mark.parametrize("text", [SAID[:40], "", "a\tb"])
def test_a_line_that_fits_stays(text: str) -> None:
    assert shown(text, 40) == [text]


def test_lines_of_their_own_stay_so() -> None:
    assert shown("first\n  second", 40) == ["first", "  second"]


def test_a_file_gets_one_line() -> None:
    err = io.StringIO()
    Terminal(io.StringIO(), err).line(SAID)
    assert err.getvalue() == SAID + "\n"
