"""The keyboard while a reply comes."""

from __future__ import annotations

import io
import os
import sys

import pytest

from minicpm_cli.chat import keyboard
from minicpm_cli.chat.keyboard import echoed, read_utf8, unechoed

termios = pytest.importorskip("termios")


def test_nothing_is_echoed_within_and_the_old_way_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    try:
        monkeypatch.setattr(sys, "stdin", os.fdopen(theirs, "r", closefd=False))
        monkeypatch.setattr(keyboard.os, "tcgetpgrp", lambda number: os.getpgrp())
        before = termios.tcgetattr(theirs)
        with unechoed():
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
            with echoed():  # for an editor
                assert termios.tcgetattr(theirs)[3] & termios.ECHO
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.StringIO("x")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with unechoed():
            pass


@pytest.mark.parametrize(("given", "read"), [("ascii", "ä"), ("latin-1", "Ã¤"), ("utf-8", "ä")])
def test_only_ascii_is_no_encoding_of_what_is_typed(given: str, read: str) -> None:
    typed = io.TextIOWrapper(io.BytesIO("ä\n".encode()), encoding=given, errors="surrogateescape")
    read_utf8(typed)
    assert typed.readline() == f"{read}\n"
