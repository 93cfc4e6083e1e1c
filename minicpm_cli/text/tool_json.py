"""JSON calls read while they come. What is given out is the text that `json_text` makes of the whole, in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from minicpm_cli.text.tool_preview import Begun, Growing, Steps
from minicpm_cli.text.tool_values import Malformed, Types, argument_types, json_text, strict_json, typed
from minicpm_cli.types import Tool

_SPACE = re.compile(r"[ \t\n\r]*")
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # of a surrogate pair
_RUN = re.compile(  # a string's inside, as far as no escape is open
    r'(?:[^"\\\x00-\x1f]+'
    r'|\\["\\/bfnrt]'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rf"|{_HIGH}(?:\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{{4}})))*"
)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")  # one that may still become whole
_WORD = re.compile(r"[-+.\w]+(?=[^-+.\w])")
_WORDS = re.compile(r"[-+.\w]")
_ANY: Types = frozenset()


def read_calls(text: Growing, tools: Mapping[str, Tool]) -> Steps[None]:
    """{"name": ..., "arguments": {...}}, or a list of them."""
    return _Calls(text, tools).read()


class _Calls:
    def __init__(self, text: Growing, tools: Mapping[str, Tool]) -> None:
        self._text, self._tools = text, tools

    def read(self) -> Steps[None]:
        if (yield from self._next()) != "[":
            yield from self._call()
            return
        self._text.at += 1
        yield from self._call()
        while (yield from self._next()) == ",":
            self._text.at += 1
            yield from self._call()

    def _call(self) -> Steps[None]:
        tool: Tool | None = None
        argued = False
        yield from self._take("{")
        while (yield from self._next()) != "}":
            key = yield from self._key()
            if key == "name" and tool is None:
                tool = self._tools.get((yield from self._held(self._string())))
                if tool is None:
                    raise Malformed("no such tool")
                yield Begun(tool.name)
            elif key in ("arguments", "parameters"):
                if tool is None or (yield from self._next()) != "{":
                    raise Malformed("the whole is needed to tell")
                argued = True
                yield from self._object(_types_of(tool))
            else:
                yield from self._held(self._value(_ANY))
            yield from self._comma("}")
        self._text.at += 1
        if tool is not None and not argued:
            yield "{}"

    # ---- values ---------------------------------------------------------------------------------------------------

    def _value(self, types: Types) -> Steps[None]:
        first = yield from self._next()
        if first == "{":
            yield from self._object(lambda name: _ANY)
        elif first == "[":
            yield from self._list()
        elif first != '"':
            yield json_text(typed((yield from self._word()), types))
        elif not types or "string" in types:
            yield from self._string()
        else:
            yield json_text(typed((yield from self._held(self._string())), types))

    def _object(self, types_of: Callable[[str], Types]) -> Steps[None]:
        yield from self._take("{")
        before = "{"
        while (yield from self._next()) != "}":
            key = yield from self._key()
            yield f"{before}{json_text(key)}: "
            yield from self._value(types_of(key))
            yield from self._comma("}")
            before = ", "
        self._text.at += 1
        yield "{}" if before == "{" else "}"

    def _list(self) -> Steps[None]:
        yield from self._take("[")
        before = "["
        while (yield from self._next()) != "]":
            yield before
            yield from self._value(_ANY)
            yield from self._comma("]")
            before = ", "
        self._text.at += 1
        yield "[]" if before == "[" else "]"

    def _string(self) -> Steps[None]:
        text = self._text
        yield from self._take('"')
        yield '"'
        while True:
            run = _RUN.match(text.raw, text.at)
            if run is not None and run[0]:
                text.at = run.end()
                yield json_text(strict_json(f'"{run[0]}"'))[1:-1]
            rest = text.raw[text.at : text.at + 12]
            if rest.startswith('"'):
                break
            if rest and _ESCAPE.fullmatch(rest) is None:
                raise Malformed("no string of JSON")
            yield None
        text.at += 1
        yield '"'

    def _word(self) -> Steps[Any]:
        """A number, true, false or null."""
        if _WORDS.match((yield from self._next())) is None:
            raise Malformed("no value of JSON")
        while (word := _WORD.match(self._text.raw, self._text.at)) is None:
            yield None
        self._text.at = word.end()
        return strict_json(word[0])

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _next(self) -> Steps[str]:
        """The next character that is no space."""
        text = self._text
        while True:
            text.at = _SPACE.match(text.raw, text.at).end()  # type: ignore[union-attr]
            if text.at < len(text.raw):
                return text.raw[text.at]
            yield None

    def _take(self, wanted: str) -> Steps[None]:
        if (yield from self._next()) != wanted:
            raise Malformed(f"no {wanted}")
        self._text.at += 1

    def _comma(self, end: str) -> Steps[None]:
        if (yield from self._next()) != end:
            yield from self._take(",")

    def _key(self) -> Steps[str]:
        key: str = yield from self._held(self._string())
        yield from self._take(":")
        return key

    def _held(self, value: Steps[None]) -> Steps[Any]:
        """A value that is not given out."""
        said = []
        for piece in value:
            if piece is None:
                yield None
            else:
                said.append(str(piece))
        return strict_json("".join(said))


def _types_of(tool: Tool) -> Callable[[str], Types]:
    return lambda name: argument_types(tool, name)
