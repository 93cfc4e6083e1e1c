"""minicpm config and minicpm batch as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.types import Request


def test_config_shows_values_and_origins(cli, home: Path) -> None:
    (home / "config.toml").write_text("temperature = 0.25\n")
    done = cli("config", "--plain")
    rows = dict(line.split("\t", 1) for line in done.out.splitlines())
    assert rows["temperature"] == f"0.25\tconfig file {home / 'config.toml'}"
    assert rows["model"] == '"fake"\tMINICPM_MODEL'
    assert rows["plain"] == "true\tflag --plain"
    assert rows["top_p"] == "-\tdefault"


def test_config_as_json_and_as_a_table(cli, home: Path) -> None:
    assert json.loads(cli("config", "--json").out)["model"] == {"value": "fake", "origin": "MINICPM_MODEL"}
    assert cli("config", "path").out == f"{home / 'config.toml'}\n"
    assert "─" in cli("config", tty=True).out


def test_a_bad_config_file_is_named(cli, home: Path) -> None:
    (home / "config.toml").write_text("temprature = 1\n")
    done = cli("run", "hi")
    assert done.code == 2
    assert "temperature" in done.err


def test_batch_from_stdin_to_stdout(cli) -> None:
    done = cli("batch", "-", "-", "-n", "50", stdin=b'{"prompt": "a"}\n{bad\n{"id": "z", "prompt": "b"}\n')
    rows = {row["id"]: row for row in map(json.loads, done.out.splitlines())}
    assert done.code == 1
    assert rows["z"]["text"] == "You said: b"
    assert rows[2]["error"]["code"] == "invalid_json"
    assert "3 rows" in done.err


def test_batch_resumes_and_opens_the_model_only_when_needed(cli, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = ("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    first, second = FakeLLM(), FakeLLM()
    assert cli(*arguments, llm=first).code == 0
    assert first.closed
    assert cli(*arguments, llm=second).code == 0
    assert not second.seen
    refused = cli(*arguments, "-t", "0.9")
    assert refused.code == 2
    assert "--force" in refused.err


@pytest.mark.parametrize("flag", ["--retry-errors", "--force"])
def test_batch_flags_reach_the_run(cli, tmp_path: Path, flag: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    out = tmp_path / "out.jsonl"
    llm = FakeLLM()
    assert cli("batch", str(tmp_path / "in.jsonl"), str(out), llm=llm).code == 1
    extra = ("-t", "0.9") if flag == "--force" else ()
    assert cli("batch", str(tmp_path / "in.jsonl"), str(out), flag, *extra, llm=llm).code == 1


def test_batch_system_prompt_and_shard(cli) -> None:
    seen: list[Request] = []
    llm = FakeLLM(answer=lambda request: seen.append(request) or "x")  # type: ignore[func-returns-value]
    lines = b"".join(b'{"prompt": "%d"}\n' % n for n in range(4))
    done = cli("batch", "-", "-", "-q", "-s", "Be brief", "--shard", "1/2", stdin=lines, llm=llm)
    assert done.err == ""
    assert len(seen) == 2
    assert seen[0].messages[0].content == "Be brief"  # type: ignore[union-attr]


def test_batch_notices_a_model_that_was_updated_in_its_folder(cli, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    arguments = ("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "-m", str(tmp_path / "m"))
    arguments += ("--chat-template", str(tmp_path / "t.jinja"))
    assert cli(*arguments).code == 0
    again = cli(*arguments)
    assert (again.code, again.opened) == (0, False)
    for changed in (tmp_path / "m" / "model.safetensors", tmp_path / "t.jinja"):
        changed.write_text("other")
        refused = cli(*arguments)
        assert (refused.code, refused.opened) == (2, False)
        assert ("chat_template" if changed.suffix == ".jinja" else changed.name) in refused.err
        assert cli(*arguments, "--force").code == 0
