"""A value as the text of an XML element, as rules of a grammar: texts without quotes, in a CDATA section where they
need one, and all else as JSON. Of the schema of a text, `format` is not held to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from minicpm_cli.grammar.source import embedded_json, refuse
from minicpm_cli.text.tool_values import json_type

Schema = dict[str, Any]
_PLAIN = r"/[^<&\n]*/"
# Up to its end ]]>, which is not inside: Cameron, "REX: XML shallow parsing with regular expressions" (1998).
_SECTION = r"/[^\]]*\](?:[^\]]+\])*\]+(?:[^\]>][^\]]*\](?:[^\]]+\])*\]+)*>/"
_END, _END_LENGTH = r"\]\]>", 3
_DEFINITIONS = ("$defs", "definitions")
_DEPTH = 8  # of references and alternatives in a schema


def element_rules(rule: str, schema: Schema) -> list[str]:
    """The lines of `rule`, which is what stands between the tags. Raises RequestError(schema_invalid)."""
    branches = _branches(schema)
    ways = [f"{rule}_{place}" for place in range(len(branches))]
    lines = [line for way, branch in zip(ways, branches, strict=True) for line in _branch(way, branch)]
    return [f"{rule}: {' | '.join(ways)}", *lines]


def _branch(rule: str, schema: Schema) -> list[str]:
    if "enum" in schema:
        return [f"{rule}: {' | '.join(map(_known, schema['enum']))}"]
    if schema.get("type", "string") != "string":
        return [f"{rule}_j: {embedded_json(schema)}", f'{rule}: {rule}_j | "<![CDATA[" {rule}_j "]]>"']
    upper = rule.upper()
    return [
        f'{rule}: {upper}_P | "<![CDATA[" {upper}_C',
        f"{upper}_P: {_PLAIN}{_bounds(schema)}",
        f"{upper}_C: {_SECTION}{_bounds(schema, _END, _END_LENGTH)}",
    ]


def _known(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    plain = not set(text) & set("<&\n")
    return json.dumps(text if plain else f"<![CDATA[{text}]]>", ensure_ascii=False)


def _branches(schema: Schema) -> list[Schema]:
    """The schema as alternatives of one type each. Where one of them is a text, whatever is no text, but null, is left
    out: unquoted, it would be read as one.
    """
    found = _alternatives(schema, schema, _DEPTH)
    texts = [each for each in found if each.get("type") == "string"]
    return [*texts, *(each for each in found if each.get("type") == "null")] if texts else found


def _alternatives(schema: Schema, root: Schema, depth: int) -> list[Schema]:
    if depth and isinstance(schema.get("$ref"), str):
        return _alternatives(_referred(root, schema["$ref"]), root, depth - 1)
    several = schema.get("anyOf", schema.get("oneOf"))
    if depth and several:
        return [each for part in several for each in _alternatives(part, root, depth - 1)]
    if "enum" in schema or "const" in schema:
        return _by_type(schema["enum"] if "enum" in schema else [schema["const"]])
    whole = {word: root[word] for word in _DEFINITIONS if word in root} | schema
    if depth and schema.get("allOf"):
        first = _alternatives(schema["allOf"][0], root, depth - 1)[0]
        return [{word: first[word] for word in ("type",) if word in first} | whole]
    kinds = schema.get("type")
    return [whole | {"type": kind} for kind in kinds] if isinstance(kinds, list) else [whole]


def _by_type(values: list[Any]) -> list[Schema]:
    kinds = dict.fromkeys(map(json_type, values))
    return [{"type": kind, "enum": [value for value in values if json_type(value) == kind]} for kind in kinds]


def _referred(root: Any, path: str) -> dict[str, Any]:
    for step in path.removeprefix("#/").split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if isinstance(root, dict) else {}


def _bounds(schema: dict[str, Any], end: str = "", length: int = 0) -> str:
    """What the schema of a string says of its length and letters, and `end` behind it, as more expressions to match."""
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.{{{least + length},{'' if most is None else most + length}}})/")
    if "pattern" in schema:
        parts.append(f"/{_searched(schema['pattern'])}{end}/")
    return "".join(f" & {part}" for part in parts)


def _searched(pattern: str) -> str:
    """A pattern of JSON Schema may be found anywhere in the text."""
    from llguidance import regex_to_lark

    before = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    inside = pattern.removeprefix("^")[: -1 if ends else None]
    if (inside != pattern) and _forks(inside):
        refuse(f"the pattern {pattern!r} has alternatives beside ^ or $; put them in brackets")
    return f"{before}(?:{regex_to_lark(inside, 'd')}){'' if ends else '(?s:.*)'}"


def _forks(pattern: str) -> bool:
    """Whether there is a | outside of all brackets."""
    depth = 0
    for char in re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL):
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            return True
    return False
