"""Where a JSON schema goes wrong: its subschemas with their places, and the keywords that no grammar can be made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# What constrains an answer and what llguidance 1.9 cannot follow. Unknown words are annotations, as JSON Schema has it.
UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"),
    )
)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_NUMBERS = ("exclusiveMinimum", "exclusiveMaximum")
_NEUTRAL: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}


def subschemas(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema's objects and their JSON pointers, inner ones first."""
    if not isinstance(schema, dict):
        return
    for word in _OF_NAMES:
        if isinstance(schema.get(word), dict):
            for name, inner in schema[word].items():
                yield from subschemas(inner, f"{place}/{word}/{_escaped(name)}")
    for word in _LISTS:
        if isinstance(schema.get(word), list):
            for number, inner in enumerate(schema[word]):
                yield from subschemas(inner, f"{place}/{word}/{number}")
    for word in _SINGLE:
        yield from subschemas(schema.get(word), f"{place}/{word}")
    yield place, schema


def unsupported(schema: Any) -> tuple[str, str] | None:
    """The place of the first schema that cannot be followed, and what is wrong with it."""
    for place, inner in subschemas(schema):
        for word in sorted(UNSUPPORTED & inner.keys()):
            if word not in _NEUTRAL or inner[word] != _NEUTRAL[word]:
                return place, f"{word} is not supported; remove it or say it otherwise"
        if isinstance(inner.get("items"), list):
            return place, "items is a list, as in older drafts; name it prefixItems, and additionalItems items"
        for word in _NUMBERS:
            if isinstance(inner.get(word), bool):
                return place, f"{word} is {json.dumps(inner[word])}; it must be a number (true is of draft 4)"
    return None


def without_neutral(schema: Any) -> Any:
    """The schema without the keywords that say what holds anyway, such as `uniqueItems: false`."""
    for _, inner in subschemas(schema):
        for word in _NEUTRAL:
            inner.pop(word, None)
    return schema


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
