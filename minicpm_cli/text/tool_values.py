"""The arguments of a call as JSON text, each value of the type that the tool's schema gives its parameter."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from minicpm_cli.types import Tool

Types = frozenset[str]  # of JSON schema; none of them: anything goes

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6}));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_DEPTH = 8  # of references and alternatives in a schema
_NONE: Types = frozenset()
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
_LONGEST = 400  # characters of a number


class Malformed(ValueError):
    """What began as a call is none."""


def argument_types(tool: Tool, name: str) -> Types:
    """What the schema of `tool` allows its parameter `name` to be."""
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, tool.parameters, _DEPTH)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Types:
    if not isinstance(schema, Mapping) or not depth:
        return _NONE
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(t for t in given if isinstance(t, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema["enum"]))
    if "const" in schema:
        return frozenset((json_type(schema["const"]),))
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(root, schema["$ref"]), root, depth - 1)
    several = (schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list))
    found = [_types(part, root, depth - 1) for part in next(several, [])]
    return frozenset().union(*found) if all(found) else _NONE


def _referred(root: Any, path: str) -> Any:
    for step in path.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", tuple: "array", dict: "object"}
    return names.get(type(value), "null")


def fits(value: Any, types: Types) -> bool:
    kind = json_type(value)
    whole = isinstance(value, float) and value.is_integer() and "integer" in types
    return not types or kind in types or (kind == "integer" and "number" in types) or whole


def from_text(text: str, types: Types) -> str:
    """The JSON text of a value that was written without quotes, as a tag's content.

    A string's text is kept to the letter, and so are the digits of a number. What does not fit its type is a string,
    and the caller's own check will find it.
    """
    if types == {"string"}:
        return json_text(text)
    word = text.strip()
    if "string" in types:
        return "null" if word == "null" and "null" in types else json_text(text)
    if _is_number(word, types):
        return word
    found = _literal(word)
    fitting = found and not isinstance(found[0], str) and fits(found[0], types)
    return json_text(typed(found[0], types) if found and fitting else text)


def _is_number(word: str, types: Types) -> bool:
    """Whether it is one that every reader of JSON can hold, of a type that is wanted."""
    if len(word) > _LONGEST or not _NUMBER.fullmatch(word) or math.isinf(float(word)):
        return False
    return not types or "number" in types or ("integer" in types and word.lstrip("-").isdigit())


def _literal(word: str) -> tuple[Any] | None:
    """A JSON value, else one of Python."""
    for read in (strict_json, ast.literal_eval):
        try:
            value = read(word)
            json_text(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return (value,)
    return None


def typed(value: Any, types: Types) -> Any:
    """A value that was written with its type, as the parameter's type has it: 12345 for a string is "12345"."""
    if fits(value, types):
        return int(value) if isinstance(value, float) and types and "number" not in types else value
    if "string" in types and isinstance(value, int | float) and not isinstance(value, bool):
        return json_text(value)
    if isinstance(value, str):
        found = _literal(value.strip())
        return found[0] if found and fits(found[0], types) else value
    return value


def typed_arguments(tool: Tool, given: Mapping[str, Any]) -> str:
    return json_text({name: typed(value, argument_types(tool, name)) for name, value in given.items()})


def json_text(value: Any) -> str:
    """Raises ValueError or TypeError for what JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise Malformed(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Malformed(f"{digits[:40]} is out of range")
    return value


def without_entities(text: str) -> str:
    """XML's five entities and character references as characters; any other & is itself."""
    return _ENTITY.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    if found[1]:
        return _NAMED[found[1]]
    code = int(found[2]) if found[2] else int(found[3], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else found[0]
