"""The program with a fake model in a terminal of its own, as a person has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
from emulator import Emulator

FAKE = str(Path(__file__).parents[1] / "fake_cli.py")
PROMPT = r"\x1b\[\?2004h[^>]*>"  # bracketed paste goes on with every prompt
Start = Callable[..., Any]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Settings, sessions and history are kept in `folder`."""
    (folder / "config.toml").touch()
    own = {
        "MINICPM_DATA_DIR": str(folder / "data"),
        "MINICPM_CONFIG": str(folder / "config.toml"),
        "MINICPM_MODEL": "fake",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
    }
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return kept | own | variables


def spawn(
    folder: Path, *arguments: str, delay: float = 0.0, rows: int = 24, columns: int = 80, **variables: str
) -> pexpect.spawn:
    """The running program; its `logfile_read` is an Emulator, which tells where its cursor is when it is asked."""
    child = pexpect.spawn(
        sys.executable,
        [FAKE, str(delay), *arguments],
        env=environment(folder, **variables),
        cwd=str(folder),
        dimensions=(rows, columns),
        encoding="utf-8",
        timeout=20,
    )
    child.logfile_read = emulator = Emulator(rows, columns)
    emulator._screen.write_process_input = lambda text: os.write(child.child_fd, text.encode())
    return child


def ask(child: pexpect.spawn, text: str, answer: str = "") -> None:
    """Types `text`, waits for `answer` and the next prompt."""
    child.send(f"{text}\r")
    if answer:
        child.expect(answer)
    child.expect(PROMPT)


def leave(child: pexpect.spawn) -> int:
    child.sendcontrol("d")
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus)
