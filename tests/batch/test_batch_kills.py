"""Nothing that kills a run or fills its disk loses, doubles or tears a row: see kills.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
