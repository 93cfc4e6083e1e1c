"""Tools over --server: sent as OpenAI has them, and calls come back as from a model of one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minicpm_cli.llm.wire import body_of, events_of
from minicpm_cli.text.tools import gathered, tools_of
from minicpm_cli.types import Message, Request, ToolCall, ToolChoice

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TALK = (
    Message("user", "q"),
    Message("assistant", "", tool_calls=(ToolCall("c1", "now", "{}"),)),
    Message("tool", "noon", tool_call_id="c1"),
)


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (ToolChoice(), "auto"),
        (ToolChoice("none"), "none"),
        (ToolChoice("required"), "required"),
        (ToolChoice("required", "now"), {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_what_is_sent(choice: ToolChoice, sent: Any) -> None:
    _, body = body_of(Request("a", TALK, tools=tools_of([NOW]), tool_choice=choice), "m", ())
    assert (body["tools"], body["tool_choice"]) == ([NOW], sent)
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert body["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]


def test_one_call_at_a_time_is_asked_for() -> None:
    _, body = body_of(Request("a", TALK, tools=tools_of([NOW]), tool_choice=ToolChoice(parallel=False)), "m", ())
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)


def test_nothing_where_there_are_no_tools() -> None:
    _, body = body_of(Request("a", TALK[:1]), "m", ())
    assert "tools" not in body
    assert "tool_choice" not in body


@pytest.mark.parametrize(
    "pieces",
    [
        [
            {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"a": 1}'}},
        ],
        [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a": '}}, {"function": {"arguments": "1}"}}],
        [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    ],
)
def test_what_comes_back(pieces: list[dict[str, Any]]) -> None:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    lines = [f"data: {json.dumps(chunk)}\n".encode() for chunk in chunks]
    *events, last = events_of(Request("a", "q"), iter(lines), 0.0)
    assert gathered(e.tool_call for e in events if e.tool_call) == (ToolCall("c", "f", '{"a": 1}'),)
    assert last.finish == "tool_calls"
