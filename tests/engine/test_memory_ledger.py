"""The ledger of measured memory: what it tells, and that nothing that befalls its file reaches a run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minicpm_cli.engine.memory_ledger import FILE, LARGEST, Kind, Measured, errors_of, fixed_of, past, record
from minicpm_cli.engine.memory_meter import MOST_CHANGES, MemoryMeter

KIND = Kind("llama-1024x24", "bf16", "bf16", "H200", {"torch": "2.11"})
LINE = Measured(KIND, "decode", 1100, 1000, 1200, 4096, 64, 8192)
MANY = """
import sys
from pathlib import Path
from minicpm_cli.engine.memory_ledger import Kind, Measured, record
for i in range(40):
    record(Path(sys.argv[1]), [Measured(Kind("m", "bf16", "bf16", sys.argv[2]), "load", i, 1, 1, 1, 1, 1)])
"""


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    record(tmp_path / "new", [replace(LINE, time=1.5), replace(LINE, phase="load", time=2.5)])
    record(tmp_path / "new", [])
    assert past(tmp_path / "new") == [replace(LINE, time=1.5), replace(LINE, phase="load", time=2.5)]
    assert past(tmp_path) == []


def test_past_errors_are_of_the_same_kind_by_phase() -> None:
    other = replace(LINE, kind=replace(KIND, scheme="w4"), predicted=9000)
    newer = replace(LINE, kind=replace(KIND, versions={"torch": "2.12"}), predicted=700)
    load = replace(LINE, phase="load", predicted=1000)
    decode, loaded = errors_of(KIND, [LINE, other, newer, load])
    assert (decode.phase, decode.count, decode.worst, decode.worst_bytes) == ("decode", 2, -0.3, -300)
    assert decode.mean == pytest.approx(-0.1)
    assert (loaded.phase, loaded.mean, loaded.worst_bytes) == ("load", 0.0, 0)
    assert errors_of(replace(KIND, device="other"), [LINE]) == []


def test_the_context_was_measured_last_time() -> None:
    lines = [replace(LINE, phase="fixed", measured=5), replace(LINE, phase="fixed", measured=7), LINE]
    assert fixed_of("H200", lines) == 7
    assert fixed_of("A100", lines) is None


def test_the_file_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    filler = json.dumps({"old": "x" * 1000}) + "\n"
    (tmp_path / FILE).write_text(filler * (LARGEST // len(filler)))
    record(tmp_path, [LINE])
    assert (tmp_path / FILE).stat().st_size < LARGEST * 0.6
    assert past(tmp_path)[-1].predicted == LINE.predicted


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"phase": "load"}\n[1]\n\xff\xfe\n{"kind": 3}\n' + b"[" * 100_000 + b"\n")
    record(tmp_path, [LINE])
    assert len(past(tmp_path)) == 1


def test_processes_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    running = [subprocess.Popen([*command, str(n)], env=environment) for n in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    lines = past(tmp_path)
    assert (tmp_path / FILE).read_text().count("\n") == len(lines)
    assert len(lines) > 40


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    record(tmp_path, [LINE])
    record(tmp_path / "below", [LINE])
    tmp_path.chmod(stat.S_IRWXU)
    assert past(tmp_path) == []


def test_a_file_in_the_place_of_the_folder_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    record(tmp_path / "file", [LINE])


PHASES = """
import torch
from minicpm_cli.engine.memory_meter import MemoryMeter

meter = MemoryMeter(torch.device("cpu"))
with meter.during("load"):
    held = torch.ones(16 << 20)
meter.enter("prefill")
passing = torch.ones(32 << 20)
del passing
meter.enter("decode")
meter.settle()
assert held.sum() > 0
print(*(meter.peaks[phase][0] for phase in ("load", "prefill", "decode")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the memory of a process")
def test_the_meter_tells_phases_apart() -> None:
    """In a process of its own: what other tests held may be given back while this one looks."""
    done = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True)
    load, prefill, decode = (int(peak) / 2**20 for peak in done.stdout.split())
    assert load == pytest.approx(64, abs=12)
    assert prefill == pytest.approx(64 + 128, abs=24)
    assert decode == pytest.approx(64, abs=24)


def test_the_meter_gives_up_on_runs_that_change_all_the_time() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    for _ in range(MOST_CHANGES):
        meter.enter("prefill")
        meter.enter("decode")
    meter.peaks.clear()
    meter.enter("prefill")
    meter.settle()
    assert meter.peaks == {}
