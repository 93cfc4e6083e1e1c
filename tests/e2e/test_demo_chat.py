"""A session with a real model, the demo, in a terminal: what is instant is, and what was said can be said again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

PROMPT = r"\x1b\[\?2004h[^>]*>"  # bracketed paste goes on with every prompt
PAGE = 16  # tokens: what is not a whole page is read again


@pytest.fixture
def environment(tmp_path: Path, demo_gguf: Path) -> dict[str, str]:
    (tmp_path / "config.toml").touch()
    own = {k: v for k, v in os.environ.items() if not k.startswith("MINICPM_")}
    return own | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MINICPM_DATA_DIR": str(tmp_path / "data"),
        "MINICPM_CACHE_DIR": str(demo_gguf.parents[1]),
        "MINICPM_CONFIG": str(tmp_path / "config.toml"),
        "MINICPM_DEVICE": "cpu",
        "MINICPM_CTX": "512",
        "MINICPM_DTYPE": "fp32",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
    }


def answers(folder: Path, name: str) -> list[dict[str, object]]:
    lines = (folder / "data" / "sessions" / f"{name}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["role"] == "assistant"]


def test_a_session_and_its_replay(environment: dict[str, str], tmp_path: Path) -> None:
    minicpm = [sys.executable, "-m", "minicpm_cli", "chat", "-m", "demo", "-n", "24", "--plain"]
    child = pexpect.spawn(
        minicpm[0],
        [*minicpm[1:], "--session", "a"],
        env=environment,
        cwd=str(tmp_path),
        dimensions=(30, 100),
        encoding="utf-8",
        timeout=60,
    )
    child.expect(PROMPT)

    def type_(line: str) -> str:
        child.send(f"{line}\r")
        child.expect(PROMPT)
        return str(child.before)

    type_("/system You are a librarian.")
    type_("How many days are in a week?")
    type_("Name three rivers in France.")
    type_("/retry temperature=0.9 max_tokens=6 seed=1")
    assert answers(tmp_path, "a")[1]["settings"]["temperature"] == 0.9  # type: ignore[index]
    assert unread(answers(tmp_path, "a")[1]) <= PAGE
    type_("/continue")
    assert answers(tmp_path, "a")[1]["given"]
    type_("/branch spain 1")
    type_("Name three rivers in Spain.")
    assert unread(answers(tmp_path, "a+spain")[1]) <= 2 * PAGE + 16
    assert "now on a, with 2 questions" in type_("/branch -")
    type_("/retry")
    assert unread(answers(tmp_path, "a")[1]) <= PAGE
    assert re.search(r"6 replies in all: \d+ tokens in \(\d+ cached, [4-9]\d%\)", type_("/stats"))
    assert "'<|im_start|>'" in type_("/prompt")
    child.sendcontrol("d")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    arguments = ["--replay", "a+spain", "--session", "b"]
    done = subprocess.run([*minicpm, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 answers are as they were" in done.stderr
    assert [a["content"] for a in answers(tmp_path, "b")] == [a["content"] for a in answers(tmp_path, "a+spain")]


def unread(answer: dict[str, object]) -> int:
    """Tokens of its prompt that were not in the cache."""
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens"] - usage["cached_tokens"])
