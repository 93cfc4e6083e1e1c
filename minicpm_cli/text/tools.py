"""OpenAI's tools, tool_choice and tool_calls as a client sends them -> our types, or an error that names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from minicpm_cli.errors import RequestError
from minicpm_cli.types import Message, Tool, ToolCall, ToolCallDelta, ToolChoice

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_DEPTH = 64  # of objects and lists in a schema


def tools_of(raw: Any, where: str = "tools") -> tuple[Tool, ...]:
    """Raises RequestError(bad_parameter)."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        _refuse(where, "is not a list of {type, function} objects")
    tools = tuple(_tool(item, f"{where}[{i}]") for i, item in enumerate(raw))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            _refuse(f"{where}[{i}].function.name", f"{name!r} is the name of an earlier tool, too")
    return tools


def tool_choice_of(raw: Any, tools: Sequence[Tool], where: str = "tool_choice", *, parallel: Any = None) -> ToolChoice:
    """`parallel` is OpenAI's parallel_tool_calls. Raises RequestError(bad_parameter)."""
    if not isinstance(parallel, bool | None):
        _refuse("parallel_tool_calls", f"is {_shown(parallel)}; it must be true or false")
    return replace(_choice(raw, tools, where), parallel=parallel is not False)


def _choice(raw: Any, tools: Sequence[Tool], where: str) -> ToolChoice:
    if raw is None or raw in ("none", "auto"):
        return ToolChoice("none" if raw == "none" else "auto")
    named = isinstance(raw, dict) and raw.get("type") == "function"
    if raw != "required" and not named:
        _refuse(where, f'is {_shown(raw)}; it must be "none", "auto", "required" or {{type: "function", function}}')
    if not tools:
        _refuse(where, f"is {_shown(raw)}, but there are no tools")
    if not named:
        return ToolChoice("required")
    function = raw.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools)
        _refuse(f"{where}.function.name", f"is {_shown(name)}, which is none of the tools: {known}")
    return ToolChoice("required", name)


def tool_calls_of(raw: Any, where: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message. Raises RequestError(bad_parameter)."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        _refuse(where, "is not a list of {id, type, function} objects")
    return tuple(_made(item, f"{where}[{i}]") for i, item in enumerate(raw))


def check_results(messages: Sequence[Message], where: str = "messages") -> None:
    """Every result belongs to a call before it. Raises RequestError(bad_parameter)."""
    made: set[str] = set()
    for i, message in enumerate(messages):
        made |= {call.id for call in message.tool_calls}
        if message.tool_call_id is not None and message.tool_call_id not in made:
            _refuse(f"{where}[{i}].tool_call_id", f"is {message.tool_call_id!r}; no call before it has this id")


def gathered(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that came whole in these pieces."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return tuple(_joined(calls[index]) for index in sorted(calls) if not any(piece.void for piece in calls[index]))


def _joined(pieces: Sequence[ToolCallDelta]) -> ToolCall:
    first = pieces[0]
    return ToolCall(first.id or "", first.name or "", "".join(piece.arguments for piece in pieces))


def as_json(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """In OpenAI's shape."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _tool(raw: Any, where: str) -> Tool:
    function = _function(raw, where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{where}.function.name", f"is {_shown(name)}; it must be 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description"), str | None):
        _refuse(f"{where}.function.description", "is not a string")
    given = {key: value for key, value in function.items() if value is not None}
    _check_texts(given, f"{where}.function", _DEPTH)
    parameters = given.setdefault("parameters", {"type": "object", "properties": {}})  # templates look for them
    _check_schema(parameters, f"{where}.function.parameters")
    return Tool(name, parameters, {"type": "function", "function": given})


def _function(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        _refuse(where, "is not an object")
    if raw.get("type", "function") != "function":
        _refuse(f"{where}.type", f'is {_shown(raw["type"])}; only "function" is known')
    function = raw.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function", "is missing or not an object")
    return function


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, dict):
        _refuse(where, "is not a JSON schema, an object with type and properties")
    if schema.get("type", "object") != "object":
        _refuse(f"{where}.type", f'is {_shown(schema["type"])}; the parameters of a function are an "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        _refuse(f"{where}.properties", "is not an object")
    for name, member in properties.items():
        if not isinstance(member, dict):
            _refuse(f"{where}.properties.{name}", "is not an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{where}.required", "is not a list of names")


def _check_texts(value: Any, where: str, depth: int) -> None:
    """JSON allows half a surrogate pair, tokenizers do not; and templates walk a schema by calling themselves."""
    if not depth:
        _refuse(where, "is nested too deeply")
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_text(key, where)
            _check_texts(member, f"{where}.{key}", depth - 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_texts(item, f"{where}[{i}]", depth - 1)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _refuse(where.encode("ascii", "replace").decode(), f"has half a surrogate pair at character {error.start + 1}")


def _made(raw: Any, where: str) -> ToolCall:
    function = _function(raw, where)
    ident, name = raw.get("id"), function.get("name")
    if not isinstance(ident, str) or not ident:
        _refuse(f"{where}.id", "is not a string, or empty")
    if not isinstance(name, str) or not name:
        _refuse(f"{where}.function.name", "is not a string, or empty")
    for text in (ident, name):
        _check_text(text, where)
    return ToolCall(ident, name, arguments_of(function.get("arguments"), f"{where}.function.arguments"))


def arguments_of(raw: Any, where: str) -> str:
    """The text of a JSON object, given so or as the object itself; none at all is an empty one."""
    if raw is None or raw == "":
        return "{}"
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        _refuse(where, "is no JSON")
    if not isinstance(value, Mapping):
        _refuse(where, "is not the text of a JSON object")
    _check_texts(value, where, _DEPTH)
    return raw if isinstance(raw, str) else json.dumps(value, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _refuse(where: str, why: str) -> NoReturn:
    raise RequestError("bad_parameter", f"{where} {why}")
