"""Chat looks repetitions up where that pays; whoever says otherwise is heard, and other commands do not."""

from __future__ import annotations

import io

import pytest

from fakes import FakeLLM
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.settings import Settings


@pytest.mark.parametrize(
    ("arguments", "variable", "wanted"),
    [
        (["chat"], None, None),
        (["chat", "--lookup", "0"], None, 0),
        (["chat"], "3", 3),
        (["chat", "--lookup", "5"], "3", 5),
        (["run", "hello"], None, 0),
        (["run", "--lookup", "4", "hello"], None, 4),
        (["run", "hello"], "auto", None),
    ],
)
def test_who_looks_up(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str | None, wanted: int | None
) -> None:
    seen: list[Settings] = []
    if variable:
        monkeypatch.setenv("MINICPM_LOOKUP", variable)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    runtime = Runtime(open_llm=lambda settings, _: seen.append(settings) or FakeLLM())  # type: ignore[func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minicpm_cli.chat.repl.run", lambda *_: 0)
        patch.setattr("minicpm_cli.cli.chatting._lines", lambda *_: type("Lines", (), {"typed": False}))
        assert exit_code(arguments, runtime) == 0
    assert seen[0].options.lookup == wanted
