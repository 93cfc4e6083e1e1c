"""A conversation with a fake model."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from talks import Editor, Make

from fakes import FakeLLM
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.llm.info import LanguageModel


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def chat(llm: LanguageModel | None = None, **options: object) -> Chat:
        sessions = Sessions(tmp_path / "sessions")
        terminal = Terminal(io.StringIO(), io.StringIO())
        return Chat(llm or FakeLLM(), terminal, sessions, sessions.open("test"), "test", **options)  # type: ignore[arg-type]

    return chat


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Editor:
    """editor(before, after): $EDITOR finds `before` (if that is not empty) in its file, leaves `after` and ends."""

    def ready(before: str, after: str, code: int = 0) -> None:
        script = tmp_path / "editor.py"
        script.write_text(
            "import pathlib, sys\n"
            "path = pathlib.Path(sys.argv[-1])\n"
            "assert sys.argv[1] == '--wait'\n"
            f"assert path.read_text() == {before!r} or not {before!r}, path.read_text()\n"
            f"path.write_text({after!r})\n"
            f"sys.exit({code})\n"
        )
        monkeypatch.delenv("VISUAL", raising=False)
        monkeypatch.setenv("EDITOR", f"{sys.executable} '{script}' --wait")

    return ready
