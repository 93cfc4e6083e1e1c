"""The command line inside the test's process, with a fake model and a folder of its own for what it keeps."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime


@dataclass
class Result:
    code: int
    out: str
    err: str
    opened: bool  # whether the model was


class Terminal(io.TextIOWrapper):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps settings, sessions and caches of the test inside `tmp_path`."""
    monkeypatch.setenv("MINICPM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MINICPM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MINICPM_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("MINICPM_MODEL", "fake")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """cli(*arguments, stdin=bytes or None for a terminal, llm=..., tty=...) -> Result."""

    def call(*arguments: str, stdin: bytes | None = None, llm: FakeLLM | None = None, tty: bool = False) -> Result:
        model = llm or FakeLLM()
        kind = Terminal if tty else io.TextIOWrapper
        out, err = (kind(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
        source = Terminal(io.BytesIO()) if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        opened: list[FakeLLM] = []
        runtime = Runtime(open_llm=lambda s, t: opened.append(model) or model, open_prompts=lambda s, t: model)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", source)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = exit_code(arguments, runtime)
        out.flush()
        err.flush()
        texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return Result(code, texts[0], texts[1], bool(opened))

    return call
