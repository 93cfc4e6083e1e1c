"""What the batch tests share: writing lines, running them against the fake model, reading rows back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.batch.summary import BatchSummary


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Bytes as they are, everything else as JSON."""
    with open(path, "wb") as f:
        f.writelines((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    return path


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": f"hello {'word ' * (i % 7)}{i}"} for i in range(count)]


def run(source: Path | str, out: Path | str, llm: FakeLLM | None = None, **options: Any) -> BatchSummary:
    options = {"progress": False, "seed": 7} | options
    return run_batch(lambda: llm or FakeLLM(), BatchOptions(str(source), str(out), **options))


def rows(out: Path) -> list[dict[str, Any]]:
    data = out.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def no_model() -> FakeLLM:
    raise AssertionError("the model was loaded")
