"""/set schema and /set regex."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from talks import Make, told

from fakes import FakeLLM
from minicpm_cli.chat import commands
from minicpm_cli.errors import UsageError
from minicpm_cli.types import Event, Request

SCHEMA = '{"type": "object"}'


def test_one_takes_the_place_of_the_other(make: Make, tmp_path: Path) -> None:
    chat, file = make(), tmp_path / "a schema.json"
    file.write_text(SCHEMA)
    commands.run(chat, f"/set schema {file}")
    assert (chat.params.schema, chat.params.regex) == (SCHEMA, None)
    commands.run(chat, "/set regex (yes|no)")
    assert (chat.params.schema, chat.params.regex) == (None, "(yes|no)")
    commands.run(chat, f"/set schema {SCHEMA}")
    assert (chat.params.schema, chat.params.regex) == (SCHEMA, None)
    assert told(chat).splitlines()[-1] == f"schema = {SCHEMA} (set)"
    file.write_text('{"type":\n"object"}')
    commands.run(chat, f"/set schema {file}")
    assert told(chat) == """schema = '{"type":\\n"object"}' (set)\n"""
    commands.run(chat, "/set schema default")
    assert (chat.params.schema, chat.params.regex) == (None, None)


@pytest.mark.parametrize("line", ['schema {"not": {}}', "schema {", "schema nofile.json", "regex (a"])
def test_what_cannot_be_followed_changes_nothing(make: Make, line: str) -> None:
    chat = make()
    commands.run(chat, "/set regex a")
    before = chat.params
    with pytest.raises(UsageError):
        commands.run(chat, f"/set {line}")
    assert chat.params == before


def test_a_reply_that_is_not_whole_is_told(make: Make) -> None:
    class Cut(FakeLLM):
        def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
            for event in super().stream(requests):
                yield replace(event, incomplete=event.finish is not None)

    chat = make(Cut())
    chat.say("hello")
    assert "the reply is not whole" in told(chat)
