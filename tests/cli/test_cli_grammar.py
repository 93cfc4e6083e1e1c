"""--schema and --regex: what is wrong is said before a model is opened; an answer that is not whole is no success."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.types import Event, Request

SCHEMA = '{"type": "object"}'


class Cut(FakeLLM):
    """Whose answers are never whole."""

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        for event in super().stream(requests):
            yield replace(event, incomplete=event.finish is not None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schema", '{"type":\n 3,}'], "flag --schema: the schema is not JSON: "),
        (["--schema", '{"not": {}}'], "flag --schema: the schema at /: not is not supported"),
        (["--schema", "[]"], "it must be an object"),
        (["--schema", "no-such-file.json"], "or a file that holds it (No such file"),
        (["--schema", "."], "or a file that holds it (Is a directory)"),
        (["--regex", "(a"], "flag --regex: the regex '(a' cannot be used: unclosed group"),
        (["--regex", "a", "--schema", SCHEMA], "flag --schema and flag --regex: "),
    ],
)
@pytest.mark.parametrize("command", [["run", "hello"], ["batch", "IN", "OUT"], ["chat"]])
def test_what_cannot_be_followed_is_refused_before_loading(
    cli, tmp_path: Path, command: list[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "IN").write_text('{"prompt": "a"}\n')
    files = [str(tmp_path / word) if word.isupper() else word for word in command]
    done = cli(*files, *arguments, stdin=b"")
    assert (done.code, done.opened, done.out) == (2, False, "")
    assert said in done.err
    assert not (tmp_path / "OUT").exists()


def test_a_schema_comes_from_a_file_a_variable_or_the_config(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, llm = tmp_path / "schema.json", FakeLLM()
    file.write_text("\ufeff" + SCHEMA, encoding="utf-8")
    assert cli("run", "hello", "--schema", str(file), llm=llm).code == 0
    monkeypatch.setenv("MINICPM_SCHEMA", '{"not": {}}')
    assert "MINICPM_SCHEMA: the schema at /: not" in cli("run", "hello").err
    monkeypatch.delenv("MINICPM_SCHEMA")
    (tmp_path / "config.toml").write_text('[profiles.person.schema]\ntype = "object"\n')
    assert cli("run", "hello", "--profile", "person", llm=llm).code == 0
    assert [json.loads(request.params.schema or "") for request in llm.seen] == [json.loads(SCHEMA)] * 2
    file.write_bytes(b"\xff\xfe{")
    assert "it is no text in UTF-8" in cli("run", "hello", "--schema", str(file)).err


def test_an_answer_that_is_not_whole_is_no_success(cli) -> None:
    done = cli("run", "hello", "--schema", SCHEMA, llm=Cut())
    assert (done.code, done.out) == (1, "You said: hello\n")
    assert "the answer is not whole" in done.err
    assert cli("run", "-q", "hello", "--schema", SCHEMA, llm=Cut()).code == 1
    done = cli("run", "hello", "--json", "--schema", SCHEMA, llm=Cut())
    assert done.code == 1
    assert json.loads(done.out)["incomplete"] is True
    assert "incomplete" not in json.loads(cli("run", "hello", "--json", "--schema", SCHEMA).out)


def test_batch_makes_it_an_error_row(cli, tmp_path: Path) -> None:
    done = cli("batch", "-", "-", "--schema", SCHEMA, stdin=b'{"id": 7, "prompt": "hello"}\n', llm=Cut())
    assert done.code == 1
    row = json.loads(done.out)
    assert (row["id"], row["error"]["code"]) == (7, "schema_incomplete")


def test_a_lines_own_schema_takes_the_place_of_the_flag(cli) -> None:
    llm = FakeLLM()
    lines = [{"prompt": "a"}, {"prompt": "a", "regex": "x"}, {"prompt": "a", "schema": {"enum": [1]}}]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    assert cli("batch", "-", "-", "--schema", SCHEMA, stdin=data, llm=llm).code == 0
    seen = {(request.params.schema, request.params.regex) for request in llm.seen}
    assert seen == {(SCHEMA, None), (None, "x"), ('{"enum": [1]}', None)}
