"""An answer of a real model, the demo, in a terminal whose window changes all the time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pexpect = pytest.importorskip("pexpect")

from emulator import Emulator  # noqa: E402
from spawned import PROMPT, environment, leave  # noqa: E402

SIZES = [(9, 40), (30, 100), (5, 30), (24, 80), (4, 22), (12, 60)]  # rows, columns


@pytest.fixture
def child(tmp_path: Path, demo_gguf: Path) -> Iterator[pexpect.spawn]:
    own = {"MINICPM_DEVICE": "cpu", "MINICPM_CTX": "512", "PROMPT_TOOLKIT_NO_CPR": "1"}
    spawned = pexpect.spawn(
        sys.executable,
        ["-m", "minicpm_cli", "chat", "-q", "-m", str(demo_gguf), "-t", "0", "-n", "200", "--session", "s"],
        env=environment(tmp_path, **own),
        dimensions=(24, 80),
        encoding="utf-8",
        timeout=60,
    )
    spawned.logfile_read = Emulator(24, 80, reflow=True)
    spawned.expect(PROMPT)
    yield spawned
    spawned.close(force=True)


def stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data" / "sessions" / "s.jsonl").read_text().splitlines()]


def test_it_stands_there_once_and_ctrl_c_keeps_what_came(child: pexpect.spawn, tmp_path: Path) -> None:
    child.send("Tell a long story about a river.\r")
    child.expect(r"\x1b\[\?2004l")
    for rows, columns in SIZES:
        child.expect(r"\w+ \w+")
        child.setwinsize(rows, columns)
        child.logfile_read.resize(rows, columns)
    child.expect(PROMPT)
    answer = stored(tmp_path)[1]["content"]
    assert answer.count(" ") > 50
    shown = child.logfile_read.lines.split("a river.\n")[1].split("\n>")[0]
    assert letters(shown) == letters(answer)

    child.send("Tell another one.\r")
    child.expect(r"\x1b\[\?2004l")
    child.expect(r"\w+ \w+ \w+")
    child.sendintr()
    child.expect(PROMPT)
    partial = stored(tmp_path)[3]
    assert partial["partial"]
    assert len(partial["content"]) < len(answer)
    assert letters(partial["content"]) in letters(child.logfile_read.lines)
    assert leave(child) == 0


def letters(text: str) -> str:
    """Of all but the names of languages, which are not shown."""
    return "".join(filter(str.isalnum, re.sub(r"```\w+", "", text)))
