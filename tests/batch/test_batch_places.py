"""Inputs that grow and outputs in odd places."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_tools import no_model, prompts, rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch.files import replace_file
from minicpm_cli.batch.manifest import manifest_path
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.errors import FileError, RequestError, UsageError
from minicpm_cli.types import Request


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", prompts(20))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as f:
        f.write(data)


# ---- an input that grows ------------------------------------------------------------------------------------------


def test_what_is_appended_while_it_runs_belongs_to_the_next_run(source: Path, out: Path) -> None:
    def answer(request: Request) -> str:
        append(source, b'{"id": "later%s", "prompt": "x"}\n' % request.id.encode())
        return "ok"

    assert run(source, out, FakeLLM(answer=answer)).ok == 20
    assert run(source, out).ok == 20
    assert len(rows(out)) == 40


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("cut", [1, 7, 12, 20, 26])
def test_a_line_that_its_writer_had_not_finished_is_run_whole(source: Path, out: Path, cut: int, ordered: bool) -> None:
    """Writers flush in the middle of lines. Then the half line has an error row, until it is a whole one."""
    line = b'{"id": "new", "prompt": "a"}'
    append(source, line[:cut])
    first = run(source, out, ordered=ordered)
    assert (first.ok, first.errors) == (20, {"invalid_json": 1})
    assert run(source, out, ordered=ordered).skipped == 21
    append(source, line[cut:] + b'\n{"id": "newer", "prompt": "a"}\n')
    again = run(source, out, ordered=ordered)
    assert (again.ok, again.skipped, again.exit_code) == (2, 20, 0)
    assert [row["id"] for row in rows(out)][-2:] == ["new", "newer"]
    assert len(rows(out)) == 22
    assert run(source, out, ordered=ordered).skipped == 22


def test_a_half_line_keeps_the_other_errors(source: Path, out: Path) -> None:
    llm = FakeLLM(fail=lambda r: RequestError("internal", "x") if r.id == "3" else None)
    append(source, b'{"id": "new", "pro')
    assert run(source, out, llm).failed == 2
    append(source, b'mpt": "a"}\n')
    again = run(source, out)
    assert (again.ok, again.earlier_errors) == (1, 1)
    assert [row["id"] for row in rows(out) if "error" in row] == ["r2"]


def test_a_half_line_that_was_a_row_already_is_refused(source: Path, out: Path) -> None:
    append(source, b'{"id": "new", "prompt": "a"}')
    assert run(source, out).ok == 21
    append(source, b"oops\n")
    with pytest.raises(UsageError, match="line 21 of the input, then its unfinished last one"):
        run(source, out)


# ---- where OUT may be ---------------------------------------------------------------------------------------------


def other_file_system(tmp_path: Path) -> Path | None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        return None
    return shared / f"minicpm-test-{os.getpid()}"


def test_out_on_another_file_system(source: Path, tmp_path: Path) -> None:
    folder = other_file_system(tmp_path)
    if folder is None:
        pytest.skip("there is no other file system")
    folder.mkdir()
    try:
        link = tmp_path / "link"
        link.symlink_to(folder / "out")
        llm = FakeLLM(fail=lambda r: RequestError("internal", "x") if r.id == "4" else None)
        assert run(source, link, llm, ordered=True).failed == 1
        assert run(source, folder / "out", ordered=True, retry_errors=True).ok == 1
        assert [row["id"] for row in rows(folder / "out")] == [p["id"] for p in prompts(20)]
        assert link.is_symlink()
        assert sorted(p.name for p in folder.iterdir()) == ["out", "out.manifest.json"]
    finally:
        shutil.rmtree(folder)


def test_a_dangling_symlink_and_one_in_a_circle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "out")
    with pytest.raises(FileError, match="Create it first"):
        run(source, tmp_path / "dangling")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(FileError):
        run(source, tmp_path / "circle")


def test_what_a_killed_replacement_left_is_removed(source: Path, out: Path) -> None:
    left = out.with_name(f".{out.name}.minicpm-part")
    left.write_bytes(b"half")
    run(source, out)
    assert not left.exists()


def test_an_error_of_the_disk_that_comes_late_is_told(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems say only at the next sync that a write could not be done."""
    monkeypatch.setattr("minicpm_cli.batch.syncs.SECONDS", 0.0)
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(FileError, match="No space left on device"):
            run(source, out)
    assert run(source, out).skipped < 20
    assert len(rows(out)) == 20


def test_a_replaced_file_is_whole_or_untouched(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fails(file: Any) -> None:
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match="Free some space"):
        replace_file(path, fails)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


_SMALL_DISK = """
set -e
mount -t tmpfs -o size=16k none "$1"
set +e
"$2" "$3" "$4" "$1/out" > "$5/first" 2>&1; echo $? > "$5/first.code"
cp "$1/out" "$5/after"
mount -o remount,size=1m "$1"
"$2" "$3" "$4" "$1/out" > "$5/second" 2>&1; echo $? > "$5/second.code"
cp "$1/out" "$5/whole"
"""
_RUN = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.errors import MinicpmError
try:
    run_batch(FakeLLM, BatchOptions(sys.argv[1], sys.argv[2], seed=7))
except MinicpmError as e:
    print(e)
    sys.exit(e.exit_code)
"""


def may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_small_disk_fills_up(tmp_path: Path) -> None:
    disk, said = tmp_path / "disk", tmp_path / "said"
    disk.mkdir()
    said.mkdir()
    if not may_mount(disk):
        pytest.skip("no file system may be mounted here")
    source = write_lines(tmp_path / "in", prompts(200))
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "run.py"
    script.write_text(_RUN.format(root=str(root), tests=str(root / "tests")))
    arguments = [str(disk), sys.executable, str(script), str(source), str(said)]
    subprocess.run(["unshare", "-rm", "sh", "-c", _SMALL_DISK, "sh", *arguments], check=True)
    assert (said / "first.code").read_text().strip() == "3"
    assert "No space left on device. Free some space and run the same command again." in (said / "first").read_text()
    assert 10 < len(rows(said / "after")) < 200  # whole up to the last row
    assert (said / "second.code").read_text().strip() == "0"
    run(source, tmp_path / "alone")
    assert sorted(map(json.dumps, rows(said / "whole"))) == sorted(map(json.dumps, rows(tmp_path / "alone")))


# ---- what a refusal says ------------------------------------------------------------------------------------------


def test_a_refusal_is_readable_however_long_the_values_are(source: Path, out: Path) -> None:
    run(source, out, system="word " * 5000)
    with pytest.raises(UsageError) as refused:
        run(source, out, system="word " * 4999 + "end", sampling={"stop": [str(n) for n in range(500)]})
    assert "parameters.system" in str(refused.value)
    assert "and is ..." in str(refused.value)
    assert 'word end"' in str(refused.value)
    assert "parameters.stop" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_damaged_manifest_is_named(source: Path, out: Path) -> None:
    run(source, out)
    for damage in (b"", b"{", b"[]", b'{"format": 99}', b"\xff", b"null"):
        manifest_path(out).write_bytes(damage)
        with pytest.raises(UsageError, match=r"out\.jsonl\.manifest\.json cannot be read as a manifest"):
            run_batch(no_model, BatchOptions(str(source), str(out), seed=7, progress=False))
