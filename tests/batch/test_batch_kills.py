"""Nothing that kills a run or fills its disk loses, doubles or tears a row: see kills.py."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from batch_tools import rows, write_lines

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX processes")


def disturbed(folder: Path, *arguments: str) -> int:
    """In a process without threads, which can be forked."""
    here = Path(__file__).resolve()
    paths = os.pathsep.join(str(p) for p in (here.parents[2], here.parents[1], here.parent))
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here.parent / "kills.py"), str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[0])


def test_killed_at_every_operation_in_every_mode(tmp_path: Path) -> None:
    assert disturbed(tmp_path, "sweep", "1") > 60


def test_the_disk_is_full_from_every_operation_on(tmp_path: Path) -> None:
    assert disturbed(tmp_path, "full", "1") > 60


def test_killed_within_the_last_row(tmp_path: Path) -> None:
    assert disturbed(tmp_path, "bytes", "9") > 15


def test_killed_at_random(tmp_path: Path) -> None:
    assert disturbed(tmp_path, "random", "30", "1") >= 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", [("random", "1000", "2"), ("bytes",), ("sweep",), ("full",)], ids=lambda a: a[0])
def test_killed_a_thousand_times(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert disturbed(tmp_path, *arguments) >= {"random": 1000}.get(arguments[0], 150)


def command(source: Path, out: Path) -> subprocess.Popen[bytes]:
    arguments = ["batch", str(source), str(out), "-m", "demo", "-t", "0.8", "--seed", "7", "-n", "24", "-q"]
    return subprocess.Popen([sys.executable, "-m", "minicpm_cli", *arguments], start_new_session=True)


def told(out: Path) -> list[Any]:
    """What is the same in any company: products of other shapes round otherwise, and a draw may be another token."""
    return sorted((row["id"], row["seed"], row["usage"]["prompt_tokens"]) for row in rows(out))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_model_is_killed_twenty_times(tmp_path: Path, demo_gguf: Path) -> None:
    """From the first row on: loading takes most of such a process's life."""
    system = "You answer in one short sentence. " * 8
    lines = [{"id": i, "system": system, "prompt": f"What is {i} plus {i}?"} for i in range(150)]
    source, out, draw, kills = write_lines(tmp_path / "in", lines), tmp_path / "out", random.Random(4), 0
    while kills < 20:
        process, before = command(source, out), out.stat().st_size if out.exists() else 0
        while process.poll() is None and not (out.exists() and out.stat().st_size > before):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.4))
        process.kill()
        if process.wait() != -signal.SIGKILL:
            out.unlink()  # it got to the end first
            continue
        kills += 1
        for line in out.read_bytes().split(b"\n")[:-1]:
            json.loads(line)
    assert command(source, out).wait() == 0
    alone = tmp_path / "alone"
    assert command(source, alone).wait() == 0
    assert told(out) == told(alone)
