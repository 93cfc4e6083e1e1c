"""MiniCPM5's calls: <function name="f"><param name="x">value</param></function>, values with < & or newlines in CDATA.

The tags are control tokens, and the blank behind <function and <param may be missing: its tokenizer swallows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from minicpm_cli.text.tool_blocks import Cdata, Forced, Tags
from minicpm_cli.text.tool_preview import Begun, Growing, Reading
from minicpm_cli.text.tool_rules import Notation, among_words, literal, rules
from minicpm_cli.text.tool_values import Malformed, argument_types, from_text, json_text, without_entities
from minicpm_cli.types import Tool

_NAME = r"""\s*name\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+))\s*>"""
_FUNCTION = re.compile(rf"<function{_NAME}")
_PARAM = re.compile(rf"\s*<param{_NAME}")
_SECTION = re.compile(r"<!\[CDATA\[(.*?)\]\]>(?=\s*(?:</param>|<!\[CDATA\[))", re.DOTALL)
_LOOSE = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_END = "</param>"
_ENTITIES = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;"})
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

    def preview(self, text: Growing, tools: Mapping[str, Tool]) -> Reading:
        """Parameter by parameter."""
        while (head := _FUNCTION.match(text.raw)) is None:
            yield None
        tool = tools.get(_name(head))
        if tool is None:
            raise Malformed("no such tool")
        yield Begun(tool.name)
        yield from _previewed(text, head.end(), tool)

    def forced(self, tools: Sequence[Tool]) -> Forced:
        begun, heads = '<function name="', [f'{tool.name}">' for tool in tools]
        if len(tools) == 1:
            begun, heads = begun + heads[0], [""]
        return Forced(begun, rules=rules(tools, heads, _NOTATION))

    def held(self, tools: Sequence[Tool]) -> str:
        heads = [f'name="{tool.name}">' for tool in tools]
        return among_words(rules(tools, heads, _NOTATION), self.tags.open, before='" "?')

    def refuses(self, tool: Tool) -> str | None:
        return None


def _previewed(text: Growing, at: int, tool: Tool) -> Reading:
    """The parameters from `at` on, each when its end is there."""
    looked, before = at, "{"
    while True:
        if (end := text.raw.find(_END, looked)) < 0:
            looked = max(looked, len(text.raw) - len(_END) + 1)
            yield None
            continue
        looked = end + len(_END)
        param = _PARAM.match(text.raw, at)
        if param and (found := _value(text.raw, param.end(), sure=True)):
            name = _name(param)
            yield f"{before}{json_text(name)}: {from_text(found[0], argument_types(tool, name))}"
            at, before = found[1], ", "
            looked = at


def _name(found: re.Match[str]) -> str:
    return without_entities(next((name for name in found.groups() if name is not None), ""))


def _params(body: str, tool: Tool) -> dict[str, str]:
    """Parameter to JSON text."""
    given: dict[str, str] = {}
    at = 0
    while param := _PARAM.match(body, at):
        found = _value(body, param.end())
        if found is None:
            raise Malformed("a parameter has no end")
        value, at = found
        name = _name(param)
        if name in given:
            raise Malformed("a parameter is given twice")
        given[name] = from_text(value, argument_types(tool, name))
    if body[at:].strip():
        raise Malformed("text between the parameters")
    return given


def _value(body: str, start: int, *, sure: bool = False) -> tuple[str, int] | None:
    """The text of a value that begins at `start`, and where its element ends; None if it does not. `sure`: whatever
    may follow `body`."""
    parts, at, sections = [], start, 0
    while True:
        end, section = body.find(_END, at), body.find("<![CDATA[", at)
        if end < 0:
            return None
        if section < 0 or end < section:
            parts.append(without_entities(body[at:end]))
            break
        found = _SECTION.match(body, section) or (None if sure else _LOOSE.match(body, section))
        if found is None:
            return None
        parts += [without_entities(body[at:section]), found[1]]
        at, sections = found.end(), sections + 1
    if sections and not "".join(parts[::2]).strip():
        parts[::2] = [""] * len(parts[::2])
    return "".join(parts), end + len(_END)


def _around(tool: Tool, name: str) -> tuple[str, str]:
    written = f'name="{name.translate(_ENTITIES)}">'
    return f'param_open " "? {literal(written)}', "param_close"


_NOTATION = Notation(
    kind=lambda tool, name: "text",
    around=_around,
    between="",
    ends="function_close",
    tags={"param_open": "<param", "param_close": _END, "function_close": MiniCPM5.tags.close},
)
