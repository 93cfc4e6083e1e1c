"""Tools in batch lines: what a line may say, and calls in its answer."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_tools import rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch.lines import Line
from minicpm_cli.batch.output import Answer, answer_row
from minicpm_cli.batch.records import Row, Style, parse
from minicpm_cli.types import Event, FinishReason, Message, Request, Timings, ToolCall, ToolCallDelta, ToolChoice, Usage

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "What time is it?"}]
CALLED: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


def row_of(line: dict[str, Any]) -> Row:
    return parse(Line(1, 0, json.dumps(line).encode()), Style())


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED} | body}


@pytest.mark.parametrize("line", [chat(tools=[TOOL], tool_choice="required"), {"messages": ASKED, "tools": [TOOL]}])
def test_both_kinds_of_line_take_tools(line: dict[str, Any]) -> None:
    row = row_of(line)
    assert row.error is None
    assert [tool.name for tool in row.tools] == ["now"]
    assert row.tool_choice == ToolChoice("required" if "body" in line else "auto")


@pytest.mark.parametrize("line", [chat(tools=[TOOL], parallel_tool_calls=False), {"messages": ASKED, "tools": [TOOL]}])
def test_one_call_at_a_time(line: dict[str, Any]) -> None:
    line = line if "body" in line else line | {"parallel_tool_calls": False}
    assert row_of(line).tool_choice == ToolChoice(parallel=False)


def test_calls_and_results_in_a_conversation() -> None:
    row = row_of(chat(messages=[*ASKED, *CALLED]))
    assert row.error is None
    assert row.messages[1:] == (
        Message("assistant", "", tool_calls=(ToolCall("c1", "now", "{}"),)),
        Message("tool", "noon", tool_call_id="c1"),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (chat(tools=[{"type": "function"}]), "tools[0].function is missing"),
        (chat(tools="x"), "tools is not a list"),
        (chat(tools=[TOOL], tool_choice="any"), "tool_choice is 'any'"),
        (chat(tool_choice="required"), "there are no tools"),
        (chat(tools=[TOOL], parallel_tool_calls=0), "parallel_tool_calls is 0"),
        (chat(messages=[*ASKED, CALLED[1]]), "messages[1].tool_call_id is 'c1'; no call before it"),
        (chat(messages=[{**CALLED[0], "role": "user"}]), "messages[0].tool_calls: only an assistant calls"),
        (chat(messages=[{"role": "assistant", "content": None}]), "messages[0].content is missing"),
        (chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 1}]), "tool_call_id is not a string"),
        (
            {"custom_id": 1, "url": "/v1/completions", "body": {"prompt": "a", "tools": [TOOL]}},
            "a raw prompt has no place",
        ),
    ],
)
def test_refused(line: dict[str, Any], says: str) -> None:
    row = row_of(line)
    assert row.error is not None
    assert row.error.code in ("bad_parameter", "missing_prompt")
    assert says in row.error.message


def answered(*events: Event) -> Answer:
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


CALLS = (
    Event("a", tool_call=ToolCallDelta(0, id="c1", name="now")),
    Event("a", tool_call=ToolCallDelta(0, '{"a": ')),
    Event("a", tool_call=ToolCallDelta(0, "1}")),
    Event("a", tool_call=ToolCallDelta(1, id="c2", name="now")),
    Event("a", tool_call=ToolCallDelta(1, "{}")),
    Event("a", finish="tool_calls"),
)
EXPECTED = [
    {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]


def test_calls_in_openais_answer() -> None:
    row = json.loads(answer_row(row_of(chat()), answered(*CALLS), "m", 1))
    (choice,) = row["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": EXPECTED}


def test_calls_beside_text() -> None:
    row = json.loads(answer_row(row_of({"messages": ASKED}), answered(Event("a", "Let me see."), *CALLS), "m", 1))
    assert (row["text"], row["tool_calls"], row["finish_reason"]) == ("Let me see.", EXPECTED, "tool_calls")


def test_no_calls_no_member() -> None:
    answer = answered(Event("a", "Hi"), Event("a", finish="stop"))
    assert "tool_calls" not in json.loads(answer_row(row_of({"messages": ASKED}), answer, "m", 1))
    body = json.loads(answer_row(row_of(chat()), answer, "m", 1))["response"]["body"]
    assert "tool_calls" not in body["choices"][0]["message"]


def test_the_model_is_told_of_the_tools(tmp_path: Path) -> None:
    llm = FakeLLM()
    write_lines(tmp_path / "in.jsonl", [chat(tools=[TOOL], tool_choice="none")])
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)
    assert [tool.name for tool in llm.seen[0].tools] == ["now"]
    assert llm.seen[0].tool_choice == ToolChoice("none")
    assert len(rows(tmp_path / "out.jsonl")) == 1


@dataclass
class Caller(FakeLLM):
    """It ends as it is told to."""

    ending: FinishReason = "tool_calls"

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        for request in requests:
            if request is not None:
                yield Event(request.id, tool_call=ToolCallDelta(0, id="c1", name="now"))
                yield Event(request.id, tool_call=ToolCallDelta(0, "{}"))
                yield Event(request.id, finish=self.ending, usage=Usage(1, 1), timings=Timings(), seed=1)


@pytest.mark.parametrize("ending", ["tool_calls", "malformed_tool_call", "length"])
def test_rows_that_call_are_finished_rows(tmp_path: Path, ending: FinishReason) -> None:
    write_lines(tmp_path / "in.jsonl", [chat(tools=[TOOL]), {"id": "b", "messages": ASKED, "tools": [TOOL]}])
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Caller(ending=ending))
    first, second = sorted(rows(tmp_path / "out.jsonl"), key=lambda row: "custom_id" not in row)
    (choice,) = first["response"]["body"]["choices"]
    assert (choice["finish_reason"], second["finish_reason"]) == (ending, ending)
    assert choice["message"]["tool_calls"] == second["tool_calls"] == [EXPECTED[1] | {"id": "c1"}]
