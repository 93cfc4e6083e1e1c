"""MiniCPM5's calls: <function name="f"><param name="x">value</param></function>, values with < & or newlines in CDATA.

The tags are control tokens, and the blank behind <function and <param may be missing: its tokenizer swallows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from minicpm_cli.text.tool_blocks import Cdata, Forced, Tags
from minicpm_cli.text.tool_values import Malformed, argument_types, from_text, json_text, without_entities
from minicpm_cli.types import Tool

_NAME = r"""\s*name\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+))\s*>"""
_FUNCTION = re.compile(rf"<function{_NAME}")
_PARAM = re.compile(rf"\s*<param{_NAME}")
_SECTION = re.compile(r"<!\[CDATA\[(.*?)\]\]>(?=\s*(?:</param>|<!\[CDATA\[))", re.DOTALL)
_LOOSE = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_HEADER, _BLANKS = "name", 64


class MiniCPM5:
    tags = Tags("<function", "</function>", {"<![CDATA[": Cdata()})
    shown = ("<function", "</function>", "<param", "</param>", "<function>", "<param>")

    def begins(self, raw: str) -> bool:
        """Prose may speak of a <function: only one with a name begins a call."""
        start = len(self.tags.open)
        header = raw[start : start + _BLANKS].lstrip()[: len(_HEADER)]
        return _HEADER.startswith(header)

    def parse(self, raw: str, tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
        head = _FUNCTION.match(raw)
        if head is None or not raw.endswith(self.tags.close):
            raise Malformed("no whole <function> element")
        tool = tools.get(_name(head))
        if tool is None:
            raise Malformed("no such tool")
        given = _params(raw[head.end() : -len(self.tags.close)], tool)
        members = ", ".join(f"{json_text(name)}: {value}" for name, value in given.items())
        return [(tool.name, f"{{{members}}}")]

    def forced(self, tools: Sequence[Tool]) -> Forced:
        return Forced(f'<function name="{tools[0].name}">' if len(tools) == 1 else '<function name="')

    def refuses(self, tool: Tool) -> str | None:
        return None


def _name(found: re.Match[str]) -> str:
    return without_entities(next((name for name in found.groups() if name is not None), ""))


def _params(body: str, tool: Tool) -> dict[str, str]:
    """Parameter to JSON text."""
    given: dict[str, str] = {}
    at = 0
    while param := _PARAM.match(body, at):
        value, at = _value(body, param.end())
        name = _name(param)
        if name in given:
            raise Malformed("a parameter is given twice")
        given[name] = from_text(value, argument_types(tool, name))
    if body[at:].strip():
        raise Malformed("text between the parameters")
    return given


def _value(body: str, start: int) -> tuple[str, int]:
    """The text of a value that begins at `start`, and where its element ends."""
    parts, at, sections = [], start, 0
    while True:
        end, section = body.find("</param>", at), body.find("<![CDATA[", at)
        if end < 0:
            raise Malformed("a parameter has no end")
        if section < 0 or end < section:
            parts.append(without_entities(body[at:end]))
            break
        found = _SECTION.match(body, section) or _LOOSE.match(body, section)
        if found is None:
            raise Malformed("a CDATA section has no end")
        parts += [without_entities(body[at:section]), found[1]]
        at, sections = found.end(), sections + 1
    if sections and not "".join(parts[::2]).strip():
        parts[::2] = [""] * len(parts[::2])
    return "".join(parts), end + len("</param>")
