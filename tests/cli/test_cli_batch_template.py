"""minicpm batch --template: the variables of a prompt template are keys of the lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeLLM


@pytest.fixture
def folder(home: Path) -> Path:
    (home / "templates").mkdir()
    return home / "templates"


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def told(out: str) -> dict[Any, Any]:
    return {
        row.get("custom_id", row["id"]): row["text"] if "text" in row else row["error"]["code"]
        for row in map(json.loads, out.splitlines())
    }


def test_lines_fill_a_template(cli, folder: Path) -> None:
    (folder / "tr.md").write_text(
        "---\nsystem: Speak {{ language }}.\ntemperature: 0\nvariables: {language: French}\n---\n"
        "Translate: {{ text }} {{ text }}"
    )
    llm = FakeLLM()
    rows = (
        {"id": "a", "text": "yes", "language": "German"},
        {"id": "b", "text": 7, "system": "mine"},
        {"id": "c"},
        {"id": "d", "text": "x", "messages": []},
        {"id": "e", "text": ["x"]},
        {"custom_id": "f", "text": "x"},
        {"id": "g", "text": "{{ language }}", "prompt": "and more"},
    )
    done = cli("batch", "-", "-", "--template", "tr", "--ordered", "-q", stdin=lines(*rows), llm=llm)
    assert told(done.out) == {
        "a": "You said: Translate: yes yes",
        "b": "You said: Translate: 7 7",
        "c": "missing_prompt",
        "d": "bad_parameter",
        "e": "bad_parameter",
        "f": "bad_parameter",
        "g": "You said: Translate: {{ language }} {{ language }}\n\nand more",
    }
    assert done.code == 1
    systems = [[m.content for m in request.messages if m.role == "system"] for request in llm.seen]
    assert sorted(systems) == [["Speak French."], ["Speak German."], ["mine"]]
    assert {request.params.temperature for request in llm.seen} == {0}


def test_input_is_the_prompt_of_the_line(cli, folder: Path) -> None:
    (folder / "sum.md").write_text("Sum up: {{ input }}")
    done = cli("batch", "-", "-", "--template", "sum", "-q", stdin=lines({"prompt": "a text"}, {"id": "n"}))
    assert told(done.out) == {1: "You said: Sum up: a text", "n": "missing_prompt"}


def test_another_template_is_another_batch(cli, folder: Path, tmp_path: Path) -> None:
    (folder / "t.md").write_text("One {{ x }}")
    source, out = tmp_path / "in", str(tmp_path / "out")
    source.write_bytes(lines({"x": 1}))
    assert cli("batch", str(source), out, "--template", "t").code == 0
    assert cli("batch", str(source), out, "--template", "t").code == 0
    (folder / "t.md").write_text("Two {{ x }}")
    done = cli("batch", str(source), out, "--template", "t")
    assert (done.code, "parameters.template" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("{{ x | file }}", [], "reads files"),
        ("---\nprefill: Sure\n---\n{{ x }}", [], "prefill"),
        ("---\nextract: true\n---\n{{ x }}", [], "extract"),
        ("---\nsystem: s\n---\n{{ x }}", ["--raw"], "--raw"),
    ],
)
def test_what_a_batch_does_not_do(cli, folder: Path, text: str, flags: list[str], said: str) -> None:
    (folder / "t.md").write_text(text)
    done = cli("batch", "-", "-", "--template", "t", *flags, stdin=lines({"x": 1}))
    assert (done.code, said in done.err, done.out) == (2, True, "")
