"""Killed at any moment, run again, the same bytes; and nothing that passes for a model before it is one."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.hub.files import missing_files
from minicpm_cli.quantize import folder, output
from minicpm_cli.quantize.folder import WorkFolder
from minicpm_cli.quantize.run import quantize
from quantize.quantize_jobs import job_of, silent

CHILD = """
import os, signal, sys
from pathlib import Path
from quantize.quantize_jobs import job_of, silent
from minicpm_cli.quantize.run import quantize
job = job_of(Path(sys.argv[1]), Path(sys.argv[2]), samples=12)
calls, last = 0, int(sys.argv[3])
def count(*_):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(count)
quantize(job, silent)
sys.setprofile(None)
print(calls)
"""


class Stopped(Exception):
    """Stands for the end of the process."""


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("resume") / "model", "minicpm-2b", fmt="safetensors")


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    quantize(small(source, source.parent / "whole"), silent)
    return contents(source.parent / "whole")


def small(source: Path, target: Path, **recipe: Any) -> Any:
    return job_of(source, target, **({"samples": 12} | recipe))


def test_stopped_before_any_rename_it_goes_on_and_gives_the_same_bytes(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.replace, [0]

    def rename(a: Any, b: Any) -> None:
        if left[0] == 0:
            raise Stopped
        left[0] -= 1
        real(a, b)

    monkeypatch.setattr(os, "replace", rename)
    target, done = tmp_path / "out", 0
    for _ in range(100):
        left[0] = 1 + done // 2  # the last files are written anew by every run
        try:
            quantize(small(source, target), silent)
            break
        except Stopped:
            done += 1
            assert not (target / "config.json").exists()
    assert done > 5
    assert contents(target) == whole
    assert not target.with_name("out.partial").exists()


def test_killed_at_random_moments_it_gives_the_same_bytes(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Moments are calls of functions, of which an undisturbed run makes a number that no load changes."""
    calls = int(child(source, tmp_path / "counted", 0).stdout)
    target, chance = tmp_path / "out", random.Random(7)
    for _ in range(4):
        assert child(source, target, int(calls * chance.uniform(0.02, 0.3))).returncode == -9
        assert not (target / "config.json").exists()
    assert child(source, target, 0).returncode == 0
    assert contents(target) == whole


def child(source: Path, target: Path, calls: int) -> subprocess.CompletedProcess[str]:
    """A quantization that is killed by its call number `calls`; 0 lets it end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(source), str(target), str(calls)]
    return subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)


def test_other_settings_do_not_go_on_with_the_work(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    stopped_after_a_block(source, target)
    with pytest.raises(UsageError, match=r"unfinished work of other settings \(recipe was"):
        quantize(small(source, target, damp=0.02), silent)
    os.utime(source / "generation_config.json", ns=(0, 0))
    with pytest.raises(UsageError, match="model was"):
        quantize(small(source, target), silent)


def stopped_after_a_block(source: Path, target: Path) -> None:
    def stop(phase: str, done: int, total: int, detail: str) -> None:
        if phase == "quantizing" and done == 1:
            raise Stopped

    with pytest.raises(Stopped):
        quantize(small(source, target), stop)
    assert (target.with_name("out.partial") / "block-00000.safetensors").exists()


def test_work_that_is_not_wanted_can_be_dropped(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    stopped_after_a_block(source, target)
    report = quantize(replace(small(source, target, method="rtn"), fresh=True), silent)
    assert report.recipe == "rtn w4 g32 sym"
    assert report.resumed == 0


def test_what_was_done_is_told_and_not_done_again(source: Path, tmp_path: Path) -> None:
    target, worked_at = tmp_path / "out", set()

    def listen(phase: str, done: int, total: int, detail: str) -> None:
        if phase == "quantizing" and detail:
            worked_at.add(done)

    stopped_after_a_block(source, target)
    report = quantize(small(source, target), listen)
    assert report.resumed == 1
    assert worked_at == {1}
    assert ("time", f"{report.seconds:.1f} s, 1 blocks were done before") in report.rows()
    assert len(report.layers) == 14


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path / "out")
    first.open({})
    with pytest.raises(UsageError, match="being quantized by another process"):
        WorkFolder(tmp_path / "out").open({})
    first.close()
    again = WorkFolder(tmp_path / "out")
    assert again.open({})
    again.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out: (out.mkdir(), (out / "notes.txt").touch()), "exists and is not empty"),
        (lambda out: out.touch(), "is a file"),
        (lambda out: (out.with_name("out.partial") / "a").mkdir(parents=True), "in the way"),
    ],
)
def test_a_place_that_is_taken_is_refused(source: Path, tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    make(tmp_path / "out")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=said):
        quantize(small(source, tmp_path / "out"), silent)
    assert [name for name in sorted(p.name for p in tmp_path.rglob("*")) if name != "lock"] == before


def test_an_empty_folder_is_filled(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize(small(source, tmp_path / "out"), silent)
    assert contents(tmp_path / "out") == whole


def test_a_full_disk_leaves_no_model_and_the_work_goes_on_later(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    for name in ("folder.publish", "shards.publish", "output.write_json"):
        module, function = name.split(".")

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(f"minicpm_cli.quantize.{module}.{function}", full)
            with pytest.raises(FileError, match=r"No space left on device.* run the same command"):
                quantize(small(source, target), silent)
        assert not target.exists() or "config.json" in missing_files(target)
    quantize(small(source, target), silent)
    assert contents(target) == whole


def test_a_block_that_cannot_be_written_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder.publish

    def full(aside: Path, path: Path) -> None:
        if path.name.startswith("block"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(aside, path)

    monkeypatch.setattr(folder, "publish", full)
    with pytest.raises(FileError, match=r"block-00000.*Free some space"):
        quantize(small(source, tmp_path / "out"), silent)


def test_a_disk_that_is_really_full(source: Path, tmp_path: Path) -> None:
    """/dev/full takes no byte: the joined file is written to it."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    target = tmp_path / "out"
    stopped_after_a_block(source, target)
    finished = target.with_name("out.partial") / "finished"
    finished.mkdir()
    (finished / "model.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(FileError, match="No space left on device"):
        quantize(small(source, target), silent)
    assert not target.exists()


def test_too_small_a_disk_is_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    job = small(source, tmp_path / "out")
    job = replace(job, machine=replace(job.machine, disk_free=1000))
    with pytest.raises(FileError, match=r"of disk are needed, 0\.0 MB are free"):
        quantize(job, silent)
    assert not list(tmp_path.iterdir())


def test_config_comes_last(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    real = os.replace

    def rename(a: Any, b: Any) -> None:
        if Path(b).parent.name == "out":
            moved.append(Path(b).name)
        real(a, b)

    monkeypatch.setattr(output.os, "replace", rename)
    quantize(small(source, tmp_path / "out"), silent)
    assert moved[-1] == "config.json"
    assert "model.safetensors" in moved[:-1]
    assert folder.SUFFIX == ".partial"


def test_what_gets_its_name_is_on_the_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves no file that has its name and lacks its bytes."""
    synced: dict[int, int] = {}  # inode -> bytes
    fsync, replaces = os.fsync, os.replace
    renamed: list[str] = []

    def sync(descriptor: int) -> None:
        state = os.fstat(descriptor)
        synced[state.st_ino] = state.st_size
        fsync(descriptor)

    def rename(a: Any, b: Any) -> None:
        state = os.stat(a)
        assert synced.get(state.st_ino) == state.st_size, f"{b} was not on the disk"
        renamed.append(Path(b).name)
        replaces(a, b)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    quantize(small(source, tmp_path / "out"), silent)
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(renamed)
