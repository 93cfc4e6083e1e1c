"""The real engine with a tiny model: what grouping by prefix is worth, and that nothing else changes by it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from batch_tools import rows, write_lines

from checkpoints import write_checkpoint
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.batch.summary import BatchSummary
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions

GROUPS, EACH = 6, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "minicpm4-0.5b")


def opened(model: Path) -> LLM:
    """All rows of a test have a seat, and a step has room for the prompts of most."""
    options = LoadOptions(device="cpu", dtype="fp32", ctx=1024, max_seqs=32, max_batch_tokens=8192)
    return LLM.open(options, ModelFiles("tiny", model))


def run(model: Path, source: Path, out: Path, **more: Any) -> BatchSummary:
    return run_batch(lambda: opened(model), BatchOptions(str(source), str(out), seed=7, progress=False, **more))


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    draw = random.Random(1)
    documents = [" ".join(draw.choice(("hello", "world", "the", "you")) for _ in range(300)) for _ in range(GROUPS)]
    common = {"max_tokens": 2, "temperature": 0}
    return [
        {"id": f"{g}-{k}", "system": documents[g], "prompt": f"hello {k}"} | common
        for g in range(GROUPS)
        for k in range(EACH)
    ]


@pytest.mark.parametrize("order", ["group by group", "mixed"])
def test_a_common_prompt_is_computed_once(model: Path, tmp_path: Path, lines: list[Any], order: str) -> None:
    mixed = lines if order == "group by group" else random.Random(2).sample(lines, len(lines))
    done = run(model, write_lines(tmp_path / "in", mixed), tmp_path / "out")
    usage = [row["usage"] for row in rows(tmp_path / "out")]
    leaders = [one for one in usage if one["cached_tokens"] < 100]
    assert done.ok == GROUPS * EACH
    assert len(leaders) == GROUPS
    assert all(one["prompt_tokens"] - one["cached_tokens"] < 48 for one in usage if one not in leaders)
    assert done.cache_hit_rate > 0.7


def test_a_resumed_file_is_that_of_one_run(model: Path, tmp_path: Path, lines: list[Any]) -> None:
    source, out = write_lines(tmp_path / "in", lines[:12]), tmp_path / "out"
    run(model, source, tmp_path / "alone", ordered=True)
    run(model, source, out, ordered=True)
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:5]) + b'{"id": "0-5", "te')
    assert run(model, source, out, ordered=True).ok == 7

    def told(path: Path) -> list[Any]:
        return [(row["id"], row["text"], row["seed"]) for row in rows(path)]

    assert told(out) == told(tmp_path / "alone")


def test_a_row_that_can_never_fit_fails_alone(model: Path, tmp_path: Path) -> None:
    asked = {"a": "hello", "b": "x" * 3_000_000, "c": "the " * 2000}
    source = write_lines(tmp_path / "in", [{"id": i, "prompt": text, "max_tokens": 2} for i, text in asked.items()])
    done = run(model, source, tmp_path / "out")
    assert (done.ok, done.errors) == (1, {"context_overflow": 2})
    assert all(len(json.dumps(row)) < 1000 for row in rows(tmp_path / "out"))
