"""Calls in a notation of the model's own as rules of a grammar: each argument held to its schema.

The rules are Lark's, but for lines of four kinds that `minicpm_cli.grammar.calls` completes: `x: %json [place,
schema]` is a value in JSON, `x: %text [place, schema]` one as the text of an XML element, `x: %tag "text"` a control
token, where the vocabulary has it as one, and `x: %until "text"` whatever is said before that, and it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minicpm_cli.errors import RequestError
from minicpm_cli.types import Tool

# What a schema of parameters can say beside its properties, and what arguments that come one by one cannot be held to.
BEYOND = frozenset(
    (
        *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "const", "enum"),
        *("minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    )
)
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Notation:
    """How arguments are written: what is around the name and value of each, and between two of them.

    `around` raises RequestError for a name that it cannot write. Its texts are rules: literals, or names of `tags`.
    """

    kind: Callable[[Tool, str], Literal["json", "text"]]
    around: Callable[[Tool, str], tuple[str, str]]
    between: str
    ends: str
    tags: Mapping[str, str]


def rules(tools: Sequence[Tool], heads: Sequence[str], notation: Notation) -> str:
    """The grammar of one call of any of these, each behind its head. Raises RequestError(schema_invalid)."""
    lines = [f"start: {' | '.join(f't{place}' for place in range(len(tools)))}"]
    lines += [f"{name}: %tag {json.dumps(tag)}" for name, tag in notation.tags.items()]
    for place, (tool, head) in enumerate(zip(tools, heads, strict=True)):
        lines.append(f"t{place}: {literal(head)} t{place}_a0 {notation.ends}")
        lines += _arguments(f"t{place}", tool, notation)
    return "\n".join(lines)


def among_words(rules: str, opening: str, before: str = "", behind: str = "") -> str:
    """`rules`, whose beginning is a call, as those of an answer that calls where it likes: a call has `opening` and,
    as rules, what is `before` and `behind` it.
    """
    first, _, rest = rules.partition("\n")
    call = first.removeprefix("start: ")
    return "\n".join(
        (
            "start: (spoken call)* TEXT",
            r"TEXT: /(.|\n)*/",
            f"spoken: %until {literal(opening)}",
            f"call: {before} ({call}) {behind}",
            rest,
        )
    )


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _arguments(rule: str, tool: Tool, notation: Notation) -> Iterator[str]:
    """In the order of the schema. a0, a1, ...: what may come where nothing has come yet, b1, b2, ... behind another."""
    schemas, required = _parameters(tool)
    for i, (name, schema) in enumerate(schemas.items()):
        before, after = notation.around(tool, name)
        one = f"{before} {rule}_v{i} {after}"
        skipped = (
            {"a": f" | {rule}_a{i + 1}", "b": f" | {rule}_b{i + 1}"} if name not in required else {"a": "", "b": ""}
        )
        yield f"{rule}_a{i}: {one} {rule}_b{i + 1}{skipped['a']}"
        yield f"{rule}_b{i}: {literal(notation.between)} {one} {rule}_b{i + 1}{skipped['b']}"
        yield f"{rule}_v{i}: %{notation.kind(tool, name)} {json.dumps([f'{tool.name}.{name}', schema])}"
    yield f'{rule}_a{len(schemas)}: ""'
    yield f'{rule}_b{len(schemas)}: ""'


def _parameters(tool: Tool) -> tuple[dict[str, Any], frozenset[str]]:
    """The schema of each parameter, with the definitions that it may refer to, and which ones are required."""
    if beyond := sorted(BEYOND & tool.parameters.keys()):
        raise RequestError(
            "schema_invalid",
            f"tools: a call of {tool.name} cannot be held to {beyond[0]} beside its properties, as this model writes "
            "its calls; say it in the properties, or let tool_choice be auto",
        )
    around = {word: tool.parameters[word] for word in _DEFINITIONS if word in tool.parameters}
    required = list(tool.parameters.get("required", ()))
    properties = tool.parameters.get("properties", {})
    names = dict.fromkeys((*properties, *required))
    return {name: {**around, **properties.get(name, {})} for name in names}, frozenset(required)
