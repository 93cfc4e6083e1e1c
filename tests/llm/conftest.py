"""Tiny models with random weights, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions

Open = Callable[..., LLM]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "minicpm4-0.5b")


@pytest.fixture
def load(folder: Path) -> Open:
    """load(path=..., **load options) -> LLM in float32."""

    def opened(path: Path | None = None, **options: object) -> LLM:
        wanted = {"device": "cpu", "dtype": "fp32", "ctx": 256, "max_seqs": 2} | options
        return LLM.open(LoadOptions(**wanted), ModelFiles("tiny", path or folder))  # type: ignore[arg-type]

    return opened
