"""Which model the rows of an output file were made with: a name alone does not say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_tools import prompts, run, write_lines

from minicpm_cli.batch.manifest import manifest_path
from minicpm_cli.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", prompts(20))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def refused(match: str, source: Path, out: Path, **options: Any) -> None:
    with pytest.raises(UsageError, match=match):
        run(source, out, **options)


def manifest_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest_path(out).read_bytes())
    return found


def test_a_model_updated_under_its_name_is_refused(source: Path, out: Path) -> None:
    old, new = {"revision": "a" * 40}, {"revision": "b" * 40}
    assert run(source, out, identify=lambda: old).ok == 20
    match = f'the model\'s revision was "{"a" * 40}" and is "{"b" * 40}".*--force'
    refused(match, source, out, identify=lambda: new)
    assert run(source, out, identify=lambda: new, force=True).skipped == 20
    assert run(source, out, identify=lambda: new).skipped == 20


def test_a_model_that_is_fetched_by_the_run_is_recorded(source: Path, out: Path) -> None:
    known: list[dict[str, Any]] = [{}, {"revision": "a"}]
    assert run(source, out, identify=lambda: known.pop(0)).ok == 20
    assert manifest_of(out)["files"] == {"revision": "a"}


def test_a_model_that_is_gone_and_comes_back_another_is_refused(source: Path, out: Path) -> None:
    """Its copy was deleted between two runs, so nothing is known of it before it is fetched again."""
    assert run(source, out, identify=lambda: {"revision": "a"}).ok == 20
    assert run(source, out, identify=dict).skipped == 20  # a finished file needs no model
    with open(source, "ab") as f:
        f.write(b'{"id": "new", "prompt": "a"}\n')
    before = out.read_bytes()
    for _ in range(2):  # the refusal has not made the old rows the new model's
        known: list[dict[str, Any]] = [{}, {"revision": "b"}]
        refused('revision was "a" and is "b"', source, out, identify=lambda known=known: known.pop(0))
    assert out.read_bytes() == before
    assert run(source, out, identify=lambda: {"revision": "a"}).ok == 1


def test_a_manifest_without_the_model_takes_the_one_it_goes_on_with(source: Path, out: Path) -> None:
    run(source, out, identify=lambda: {"revision": "a"})
    old = manifest_of(out)
    del old["files"]
    manifest_path(out).write_text(json.dumps(old))
    assert run(source, out, identify=lambda: {"revision": "b"}).skipped == 20
    assert manifest_of(out)["files"] == {"revision": "b"}


def test_another_model_is_named_without_its_files(source: Path, out: Path) -> None:
    files = {f"model-{i}.safetensors": {"bytes": 1, "mtime_ns": 2} for i in range(40)}
    run(source, out, model={"model": "a"}, identify=lambda: files)
    refused(
        r'other settings: model\.model was "a" and is "b"\. ',
        source,
        out,
        model={"model": "b"},
        identify=lambda: {"x": 1},
    )
    later = {name: {"bytes": 1, "mtime_ns": 3} for name in files}
    match = r"the model's model-0\.safetensors was .* 37 more of the model's files are others\. Use"
    refused(match, source, out, model={"model": "a"}, identify=lambda: later)
