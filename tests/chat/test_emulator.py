"""The terminal that judges what chat draws."""

from __future__ import annotations

import pytest
from emulator import Emulator

TEXT = "one \x1b[2mtwo\x1b[0m \x1b]8;;http://a.b\x1b\\three\x1b]8;;\x1b\\\r\nfour \x1b[38;5;9mfive\x1b[m"


@pytest.mark.parametrize("at", range(len(TEXT) + 1))
def test_a_window_that_changes_within_an_escape_sequence(at: int) -> None:
    screen = Emulator(10, 40, reflow=True)
    screen.write(TEXT[:at])
    screen.resize(10, 60)
    screen.write(TEXT[at:])
    assert screen.lines == "one two three\nfour five"
