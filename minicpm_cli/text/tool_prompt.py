"""Tools and tool calls as a chat template is given them, with marks in every text that is not the schema's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minicpm_cli.errors import RequestError
from minicpm_cli.types import Tool, ToolCall

BreakUp = Callable[[str], str]

# Words that templates compare with; a mark inside would make them strangers.
_FUNCTION = frozenset(("name", "description", "parameters", "strict", "returns", "return"))
_SCHEMA = frozenset(
    """
    type properties required items enum const default description title format pattern examples additionalProperties
    anyOf oneOf allOf not minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength minItems maxItems
    uniqueItems multipleOf nullable prefixItems patternProperties $defs $ref definitions
    """.split()  # noqa: SIM905
)
_NAMING = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))


def tool_for_template(tool: Tool, break_up: BreakUp) -> dict[str, Any]:
    """The tool in OpenAI's shape, as transformers passes it on."""
    given = tool.definition["function"]
    function = {
        key if key in _FUNCTION else break_up(key): _schema(value, break_up)
        if key == "parameters"
        else _marked(value, break_up)
        for key, value in given.items()
    }
    return {"type": "function", "function": function}


def calls_for_template(calls: Iterable[ToolCall], break_up: BreakUp, *, as_text: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": break_up(call.id),
            "type": "function",
            "function": {"name": break_up(call.name), "arguments": _arguments(call, break_up, as_text)},
        }
        for call in calls
    ]


def _arguments(call: ToolCall, break_up: BreakUp, as_text: bool) -> Any:
    return break_up(call.arguments or "{}") if as_text else _marked(_object(call), break_up)


def _object(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError("bad_parameter", f"the arguments of the call {call.id!r} are no JSON") from None


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of members among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from texts_of(member)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def texts_of_calls(calls: Iterable[ToolCall]) -> Iterator[str]:
    for call in calls:
        yield from (call.id, call.name, call.arguments, *texts_of(_object(call)))


def _marked(value: Any, break_up: BreakUp) -> Any:
    if isinstance(value, str):
        return break_up(value)
    if isinstance(value, dict):
        return {break_up(key): _marked(member, break_up) for key, member in value.items()}
    return [_marked(item, break_up) for item in value] if isinstance(value, list) else value


def _schema(value: Any, break_up: BreakUp) -> Any:
    if isinstance(value, list):
        return [_schema(item, break_up) for item in value]
    if not isinstance(value, dict):
        return _marked(value, break_up)
    return {key if key in _SCHEMA else break_up(key): _member(key, member, break_up) for key, member in value.items()}


def _member(key: str, member: Any, break_up: BreakUp) -> Any:
    if key == "type":
        return _type(member, break_up)
    if key in _NAMING and isinstance(member, dict):
        return {break_up(name): _schema(schema, break_up) for name, schema in member.items()}
    return _marked(member, break_up) if key in ("enum", "const", "default", "examples") else _schema(member, break_up)


def _type(value: Any, break_up: BreakUp) -> Any:
    if isinstance(value, list):
        return [_type(item, break_up) for item in value]
    return value if value in _TYPES else _marked(value, break_up)


def probe_tool() -> Tool:
    """A tool whose name no template writes of its own accord."""
    schema = {"type": "object", "properties": {"q": {"type": "string", "description": "q"}}, "required": ["q"]}
    function = {"name": "q_probe_q", "description": "q", "parameters": schema}
    return Tool("q_probe_q", schema, {"type": "function", "function": function})


def probe_call() -> ToolCall:
    return ToolCall("call000000", "q_probe_q", '{"q_name_q": "q_value_q"}')


def shows_python(rendered: str) -> bool:
    """Whether a template wrote the arguments of `probe_call` as Python prints a dict: it wants their JSON text."""
    return "{'q_name_q'" in rendered
