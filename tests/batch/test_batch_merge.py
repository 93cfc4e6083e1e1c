"""Shards that were run apart are one file again, or it is said what is wrong with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from batch_tools import prompts, rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch.files import Lock
from minicpm_cli.batch.manifest import manifest_path, read_manifest
from minicpm_cli.batch.merge import merge
from minicpm_cli.errors import FileError, UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [*prompts(23), b"{bad"])


def shards(source: Path, count: int, **options: Any) -> list[Path]:
    paths = [source.with_name(f"out.{index}.jsonl") for index in range(1, count + 1)]
    for index, path in enumerate(paths, 1):
        run(source, path, shard=(index, count), **options)
    return paths


def whole(source: Path, **options: Any) -> list[dict[str, Any]]:
    path = source.with_name("whole.jsonl")
    run(source, path, ordered=True, **options)
    return rows(path)


def test_in_the_order_of_the_input_they_are_what_one_run_gives(source: Path, tmp_path: Path) -> None:
    parts, target = shards(source, 3, seed=5), tmp_path / "all.jsonl"
    merged = merge(target, parts[::-1], source)
    assert rows(target) == whole(source, seed=5)
    assert (merged.ok, dict(merged.errors), merged.exit_code) == (23, {"invalid_json": 1}, 1)
    assert "24 rows of 3 shards: 23 ok, 1 failed." in list(merged.lines())


def test_without_the_input_they_stand_one_after_the_other(source: Path, tmp_path: Path) -> None:
    parts, target = shards(source, 2), tmp_path / "all.jsonl"
    assert not merge(target, parts).ordered
    assert target.read_bytes() == parts[1].read_bytes() + parts[0].read_bytes(), "shard n/n is the first"


def test_shards_draw_from_one_seed_without_being_told(source: Path) -> None:
    found = {read_manifest(manifest_path(path)).seed for path in shards(source, 3, seed=None)}  # type: ignore[union-attr]
    assert len(found) == 1


def test_batch_goes_on_with_the_whole(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "all.jsonl"
    merge(target, shards(source, 2), source)
    before = rows(target)
    assert run(source, target, FakeLLM(), retry_errors=True).skipped == 23
    assert rows(target) == before


def test_what_is_missing_is_named(source: Path, tmp_path: Path) -> None:
    parts, target = shards(source, 3), tmp_path / "all.jsonl"
    parts[0].write_bytes(b"".join(parts[0].read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(UsageError, match=r"shard 2/3; 2 of the 8 rows of .*out\.1\.jsonl"):
        merge(target, [parts[0], parts[2]])
    assert not target.exists()
    merged = merge(target, [parts[0], parts[2]], force=True)
    assert len(rows(target)) == 14
    assert merged.exit_code == 1
    assert not manifest_path(target).exists(), "it would promise that the rest is done"


def test_a_torn_row_is_no_row(source: Path, tmp_path: Path) -> None:
    parts, target = shards(source, 2), tmp_path / "all.jsonl"
    parts[1].write_bytes(parts[1].read_bytes()[:-5])
    with pytest.raises(FileError, match="torn"):
        merge(target, parts)
    assert not target.exists()
    merge(target, parts, force=True)
    assert len(rows(target)) == 23


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m | {"model": {"model": "other"}}, "another model than .*: None, not other"),
        (lambda m: m | {"parameters": m["parameters"] | {"system": "hi"}}, "another system than"),
        (lambda m: m | {"input": m["input"] | {"sha256": "0" * 64}}, r"another input \(sha256\)"),
        (lambda m: m | {"shard": "1/4"}, "one of 2 shards, .* one of 4"),
        (lambda m: m | {"shard": "1/2"}, "are both shard 1/2"),
        (lambda m: m | {"shard": None}, "of a whole input"),
    ],
)
def test_shards_of_other_runs_are_refused(source: Path, tmp_path: Path, change: Any, said: str) -> None:
    parts = shards(source, 2)
    path = manifest_path(parts[1])
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UsageError, match=said):
        merge(tmp_path / "all.jsonl", parts)


def test_a_row_twice_is_refused(source: Path, tmp_path: Path) -> None:
    parts = shards(source, 2)
    with open(parts[0], "ab") as file:
        file.write(parts[1].read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="1 rows have an id"):
        merge(tmp_path / "all.jsonl", parts)
    assert not (tmp_path / "all.jsonl").exists()


def test_another_input_is_refused(source: Path, tmp_path: Path) -> None:
    parts = shards(source, 2)
    with pytest.raises(UsageError, match="is not the input"):
        merge(tmp_path / "all.jsonl", parts, write_lines(tmp_path / "other.jsonl", prompts(23)))


def test_files_that_are_not_touched(source: Path, tmp_path: Path) -> None:
    parts, target = shards(source, 2), tmp_path / "all.jsonl"
    with pytest.raises(UsageError, match="written and read"):
        merge(parts[0], parts)
    target.write_text("mine\n")
    with pytest.raises(UsageError, match="exists"):
        merge(target, parts)
    assert target.read_text() == "mine\n"
    merge(target, parts, overwrite=True)
    assert len(rows(target)) == 24
    with pytest.raises(FileError, match="is no file"):
        merge(tmp_path / "new.jsonl", [tmp_path / "nothing.jsonl"])
    bare = shutil.copy(parts[0], tmp_path / "bare.jsonl")
    with pytest.raises(UsageError, match="nothing is known"):
        merge(tmp_path / "new.jsonl", [bare])


def test_a_shard_that_still_runs_is_waited_for(source: Path, tmp_path: Path) -> None:
    parts = shards(source, 2)
    lock = Lock(parts[1])
    with pytest.raises(UsageError, match="being written"):
        merge(tmp_path / "all.jsonl", parts)
    lock.release()
    merge(tmp_path / "all.jsonl", parts)
    assert not list(tmp_path.glob("*.lock"))
