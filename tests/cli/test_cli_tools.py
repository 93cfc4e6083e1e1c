"""run --tools: what may be called is read before anything is loaded, and calls are in the record."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.cli.tools import read_tools
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.types import Event, FinishReason, Request, Timings, ToolCallDelta, ToolChoice, Usage

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([NOW]))
    return path


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("now", ToolChoice("required", "now")),
    ],
)
def test_a_file_of_tools(file: Path, choice: str | None, expected: ToolChoice) -> None:
    tools, chosen = read_tools(file, choice)
    assert [tool.name for tool in tools] == ["now"]
    assert chosen == expected


def test_a_whole_request_will_do(file: Path) -> None:
    file.write_text(json.dumps({"model": "m", "tools": [NOW]}))
    assert [tool.name for tool in read_tools(file, None)[0]] == ["now"]


def test_none() -> None:
    assert read_tools(None, None) == ((), ToolChoice())
    with pytest.raises(UsageError, match="--tools FILE, which is missing"):
        read_tools(None, "auto")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("3", "tools is not a list"),
        ('[{"type": "x"}]', r"tools\[0\].type is 'x'"),
        ("\xff", "no JSON"),
    ],
)
def test_refused(file: Path, text: str, says: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=says) as caught:
        read_tools(file, None)
    assert str(file) in str(caught.value)


def test_a_tool_that_is_not_there(file: Path) -> None:
    with pytest.raises(UsageError, match=r"^--tool-choice.function.name is 'x', which is none of the tools: now"):
        read_tools(file, "x")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_tools(tmp_path / "none.json", None)


@dataclass
class Caller(FakeLLM):
    """It calls, or tries to."""

    ending: FinishReason = "tool_calls"

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        for request in requests:
            assert request is not None
            self.seen.append(request)
            if self.ending == "tool_calls":
                yield Event(request.id, tool_call=ToolCallDelta(0, id="c1", name="now"))
                yield Event(request.id, tool_call=ToolCallDelta(0, "{}"))
            else:
                yield Event(request.id, "<tool_call>")
            yield Event(request.id, finish=self.ending, usage=Usage(1, 1), timings=Timings(), seed=1)


def test_calls_are_in_the_record(cli, file: Path, home: Path) -> None:
    llm = Caller()
    done = cli("run", "--json", "--tools", str(file), "--tool-choice", "required", "What time is it?", llm=llm)
    assert done.code == 0
    said = json.loads(done.out)
    assert (said["text"], said["finish_reason"]) == ("", "tool_calls")
    assert said["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    assert llm.seen[0].tool_choice == ToolChoice("required")
    assert not list(home.glob("data/sessions/*"))


def test_what_was_no_call_is_said(cli, file: Path) -> None:
    done = cli("run", "--json", "--tools", str(file), "What time is it?", llm=Caller(ending="malformed_tool_call"))
    said = json.loads(done.out)
    assert (said["text"], said["finish_reason"]) == ("<tool_call>", "malformed_tool_call")
    assert "tool_calls" not in said
    assert "was none" in done.err


@pytest.mark.parametrize(
    "arguments", [["--tools", "FILE"], ["--tool-choice", "now", "--json"], ["--tools", "none", "--json"]]
)
def test_refused_before_the_model_is_opened(cli, file: Path, arguments: list[str]) -> None:
    done = cli("run", *[str(file) if word == "FILE" else word for word in arguments], "x")
    assert done.code in (2, 3)
    assert not done.opened
