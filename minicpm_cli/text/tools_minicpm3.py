"""Calls as Python, as MiniCPM3 and 4 write them: in a fence between <|tool_call_start|> and <|tool_call_end|>.

Nothing is run: the text is taken apart by `ast`, and values are literals. History shows the model its calls with JSON
values, so true, false and null are understood, too, and a parameter called `from` is written so or as `from_`.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from minicpm_cli.errors import RequestError
from minicpm_cli.text.tool_blocks import Forced, Quoted, Tags
from minicpm_cli.text.tool_preview import Begun, Growing, Reading, Steps
from minicpm_cli.text.tool_rules import Notation, among_words, literal, rules
from minicpm_cli.text.tool_values import Malformed, argument_types, typed_arguments
from minicpm_cli.types import Tool

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_FENCE = re.compile(r"\s*```(?:[a-zA-Z]+(?=\s))?(.*?)(?:```\s*)?", re.DOTALL)
_HEAD = re.compile(r"\s*(?:```(?:[a-zA-Z]+(?=\s))?)?\s*([A-Za-z_]\w*)\(")
_NEXT = re.compile(r"[ \t]*\n\s*([A-Za-z_]\w*)\(")  # the call behind a call
_MARK = re.compile(r"'''|\"\"\"|['\"#\\,()\[\]{}]")
_JSON_NAMES: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_LONGEST_QUOTE = 3
_QUOTES = {
    "'''": Quoted("'''"),
    '"""': Quoted('"""'),
    "'": Quoted("'", ends_with_line=True),
    '"': Quoted('"', ends_with_line=True),
}


class MiniCPM3:
    tags = Tags(_OPEN, _CLOSE, _QUOTES)
    shown = (_OPEN, _CLOSE)

    def begins(self, raw: str) -> bool:
        return True

    def parse(self, raw: str, tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
        body = raw.removeprefix(_OPEN).removesuffix(_CLOSE)
        fenced = _FENCE.fullmatch(body)
        calls = _calls(_tree((fenced[1] if fenced else body).strip()))
        if not calls:
            raise Malformed("no call")
        return [_call(call, tools) for call in calls]

    def preview(self, text: Growing, tools: Mapping[str, Tool]) -> Reading:
        """Argument by argument."""
        while (head := _HEAD.match(text.raw, text.at)) is None:
            yield None
        while True:
            text.at = head.end()
            yield from _previewed(text, head[1], tools)
            while (head := _NEXT.match(text.raw, text.at)) is None:
                yield None
            yield "}"

    def forced(self, tools: Sequence[Tool]) -> Forced:
        begun, heads = f"{_OPEN}\n```python\n", [f"{tool.name}(" for tool in tools]
        if len(tools) == 1:
            begun, heads = begun + heads[0], [""]
        return Forced(begun, rules=rules(tools, heads, _NOTATION), ended=f"\n```\n{_CLOSE}")

    def held(self, tools: Sequence[Tool]) -> str:
        lines = rules(tools, [f"{tool.name}(" for tool in tools], _NOTATION)
        before, behind = literal("\n```python\n"), f"{literal(f'{chr(10)}```{chr(10)}')} close"
        return among_words(f"{lines}\nclose: %tag {literal(_CLOSE)}", _OPEN, before, behind)

    def refuses(self, tool: Tool) -> str | None:
        if tool.name.isidentifier() and not keyword.iskeyword(tool.name):
            return None
        return f"the model calls tools in Python, where {tool.name!r} can be no name; use letters, digits and _"


def _tree(code: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in what a model writes
        try:
            return ast.parse(code)
        except SyntaxError:
            return ast.parse(_named(code))


def _named(code: str) -> str:
    """`code` with a _ behind the names of arguments that are keywords of Python."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except tokenize.TokenError as error:
        raise Malformed(str(error)) from error
    lines = code.split("\n")
    for before, token, after in reversed(list(zip(tokens, tokens[1:], tokens[2:], strict=False))):
        if keyword.iskeyword(token.string) and after.string == "=" and before.string in ("(", ",", "\n"):
            row, column = token.end
            lines[row - 1] = f"{lines[row - 1][:column]}_{lines[row - 1][column:]}"
    return "\n".join(lines)


def _calls(tree: ast.Module) -> list[ast.Call]:
    found: list[ast.Call] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for item in items:
            if not isinstance(item, ast.Call):
                raise Malformed("something else than calls")
            found.append(item)
    return found


def _call(call: ast.Call, tools: Mapping[str, Tool]) -> tuple[str, str]:
    tool = tools.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if tool is None:
        raise Malformed("no such tool")
    names = list(tool.parameters.get("properties") or ())
    if len(call.args) > len(names):
        raise Malformed("more arguments than parameters")
    given = {name: _value(value, tool, name) for name, value in zip(names, call.args, strict=False)}
    for argument in call.keywords:
        name = _parameter(argument.arg, names)
        if name in given:
            raise Malformed("a parameter is given twice")
        given[name] = _value(argument.value, tool, name)
    return tool.name, typed_arguments(tool, given)


def _previewed(text: Growing, name: str, tools: Mapping[str, Tool]) -> Steps[None]:
    """The call whose bracket has just been opened, but for the brace that ends its arguments."""
    if name not in tools:
        raise Malformed("no such tool")
    yield Begun(name)
    start, depth, said = text.at, 0, ""
    while depth >= 0:
        mark = yield from _mark(text)
        if depth == 0 and mark in ",)":
            _, arguments = _call(_calls(_tree(f"{name}({text.raw[start : text.at - 1]})"))[0], tools)
            yield arguments[len(said) : -1]
            said = arguments[:-1]
        depth += (mark in "([{") - (mark in ")]}")


def _mark(text: Growing) -> Steps[str]:
    """The next bracket or comma outside of strings; the text is read up to there."""
    while True:
        found = _MARK.search(text.raw, text.at)
        span = _QUOTES.get(found[0]) if found else None
        if found is None or (span and len(text.raw) - found.start() < _LONGEST_QUOTE):
            text.at = found.start() if found else len(text.raw)
            yield None
            continue
        text.at = found.end()
        if span is None:
            if found[0] in "#\\":
                raise Malformed("the whole is needed to tell")
            return found[0]
        while True:
            closed, text.at = span.close(text.raw, text.at)
            if closed:
                break
            yield None


def _parameter(name: str | None, names: list[str]) -> str:
    if name is None:
        raise Malformed("** in a call")
    plain = name.removesuffix("_")
    return plain if name not in names and (plain in names or keyword.iskeyword(plain)) else name


def _value(node: ast.expr, tool: Tool, name: str) -> Any:
    if isinstance(node, ast.Name) and node.id not in _JSON_NAMES and "string" in argument_types(tool, name):
        return node.id  # the member of an enumeration, without quotes
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _around(tool: Tool, name: str) -> tuple[str, str]:
    if not name.isidentifier():
        raise RequestError(
            "bad_parameter",
            f"tools: the model calls {tool.name} in Python, where its parameter {name!r} can be no name; use letters, "
            "digits and _, or let tool_choice be auto",
        )
    return literal(f"{name}{'_' if keyword.iskeyword(name) else ''}="), ""


_NOTATION = Notation(kind=lambda tool, name: "json", around=_around, between=", ", ends='")"', tags={})
