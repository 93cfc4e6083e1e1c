"""Calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen and their neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minicpm_cli.text.tool_blocks import Forced, Quoted, Tags
from minicpm_cli.text.tool_json import read_calls
from minicpm_cli.text.tool_preview import Growing, Reading
from minicpm_cli.text.tool_rules import BEYOND, among_words, literal
from minicpm_cli.text.tool_values import Malformed, strict_json, typed_arguments
from minicpm_cli.types import Tool


class Hermes:
    """{"name": ..., "arguments": {...}}, or a list of them."""

    tags = Tags("<tool_call>", "</tool_call>", {'"': Quoted('"')})
    shown = ("<tool_call>", "</tool_call>")

    def begins(self, raw: str) -> bool:
        return True

    def parse(self, raw: str, tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
        body = raw.removeprefix(self.tags.open).removesuffix(self.tags.close).strip()
        value = strict_json(body)
        if value == []:
            raise Malformed("no call")
        return [_call(item, tools) for item in (value if isinstance(value, list) else [value])]

    def preview(self, text: Growing, tools: Mapping[str, Tool]) -> Reading:
        return read_calls(text, tools)

    def forced(self, tools: Sequence[Tool]) -> Forced:
        if len(tools) == 1:
            begun = f'<tool_call>\n{{"name": "{tools[0].name}", "arguments": '
            return Forced(begun, json.dumps(_schema(tools[0])), ended="}\n</tool_call>")
        calls = [_call_schema(tool, place) for place, tool in enumerate(tools)]
        definitions = {f"tool{place}": _schema(tool) for place, tool in enumerate(tools)}
        return Forced("<tool_call>\n", json.dumps({"anyOf": calls, "$defs": definitions}), ended="\n</tool_call>")

    def held(self, tools: Sequence[Tool]) -> str:
        lines = [f"start: {' | '.join(f't{place}' for place in range(len(tools)))}"]
        for place, tool in enumerate(tools):
            head = f'\n{{"name": "{tool.name}", "arguments": '
            lines.append(f"t{place}: {literal(head)} t{place}_v {literal(f'}}{chr(10)}')}")
            lines.append(f"t{place}_v: %json {json.dumps([tool.name, _schema(tool)])}")
        lines.append(f"close: %tag {literal(self.tags.close)}")
        return among_words("\n".join(lines), self.tags.open, behind="close")

    def refuses(self, tool: Tool) -> str | None:
        return None


def _schema(tool: Tool) -> dict[str, Any]:
    """Unless it says otherwise, a function takes no arguments but its parameters."""
    closed = {} if BEYOND & tool.parameters.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **tool.parameters}


def _call_schema(tool: Tool, place: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool{place}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _call(value: Any, tools: Mapping[str, Tool]) -> tuple[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Malformed("a call is an object with a name")
    tool = tools.get(value["name"])
    if tool is None:
        raise Malformed("no such tool")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = strict_json(arguments)
    if not isinstance(arguments, dict):
        raise Malformed("the arguments are no object")
    return tool.name, typed_arguments(tool, arguments)
