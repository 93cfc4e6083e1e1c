"""Whatever a mask lets through is valid JSON of its schema, in the judgement of another program (jsonschema-rs)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from grammar_walks import FAMILIES, grammars, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli.grammar.source import check
from minicpm_cli.types import SamplingParams

STRING = {"type": "string", "maxLength": 6}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": STRING,
            "address": {
                "type": "object",
                "properties": {"city": STRING, "zip": {"type": "string", "pattern": r"^\d{5}$"}},
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
            "nick": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["name", "address"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "grün", "青", 3, None, True, {"a": [1]}]},
    "const": {"const": {"x": "é\n"}},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [STRING, {"type": "integer", "maximum": 9, "minimum": -9}],
        "items": False,
    },
    "integer": {"type": "integer", "minimum": -17, "maximum": 2048},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 200},
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-(?:[0-9]+|x)$", "maxLength": 9},
    "part of a string": {"type": "string", "pattern": "[0-9]", "maxLength": 8},
    "unicode": {"type": "string", "pattern": "^[äöü漢字😀]{1,4}$"},
    "unicode names": {
        "type": "object",
        "properties": {"größe": {"type": "null"}, 'a"b\\c': {"type": "null"}},
        "required": ["größe", 'a"b\\c'],
        "additionalProperties": False,
    },
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "any of": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"const": 1}, "maxItems": 2}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "reference": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "named values": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "maxProperties": 3},
    "patterns of names": {
        "type": "object",
        "patternProperties": {"^x[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "says what holds anyway": {"type": "array", "items": {"const": 0}, "uniqueItems": False, "maxItems": 3},
    "annotated": {
        "type": "boolean",
        "title": "t",
        "description": "d",
        "default": True,
        "examples": [False],
        "x-more": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_ends_is_valid(name: str, family: str) -> None:
    schema = SCHEMAS[name]
    params, validator = SamplingParams(schema=json.dumps(schema)), jsonschema_rs.validator_for(schema)
    answers = {walk(params, seed, family) for seed in range(6)} - {None}
    assert answers, "not one of them ended"
    for answer in answers:
        assert answer is not None
        assert validator.is_valid(json.loads(answer)), answer
        assert grammars(family).complete(params, answer)
        assert not grammars(family).complete(params, answer + ",")


def test_every_schema_can_be_checked_without_a_model() -> None:
    for schema in SCHEMAS.values():
        check(SamplingParams(schema=json.dumps(schema)))


_scalars = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^a?b{1,3}$"},
        {"enum": ["x", 1.5, None, "ß"]},
    ]
)


def _object(inner: dict[str, Any], needed: int) -> dict[str, Any]:
    names = sorted(inner)
    return {"type": "object", "properties": inner, "required": names[:needed], "additionalProperties": False}


_schemas = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.text('ab {"ü', max_size=3), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda of, most: {"type": "array", "items": of, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda of: {"anyOf": of}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(_schemas, st.integers(0, 1000), st.sampled_from(FAMILIES))
@settings(max_examples=60, deadline=None)
def test_answers_of_any_schema_are_valid(schema: dict[str, Any], seed: int, family: str) -> None:
    answer = walk(SamplingParams(schema=json.dumps(schema)), seed, family)
    assert answer is not None, "every one of these schemas is finite"
    assert jsonschema_rs.is_valid(schema, json.loads(answer)), answer


def test_white_space_is_bounded_whatever_the_schema_says_of_it() -> None:
    loose = {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}, **SCHEMAS["nested"]}
    params = SamplingParams(schema=json.dumps(loose))
    complete = grammars().complete
    rest = '"name": "", "address": {"city":"", "zip": "12345"}}'
    for space in ("", " ", "\n  ", "\n\t\t", "\n" + " " * 32):
        assert complete(params, "{" + space + rest)
    for space in ("  ", "\n\n", "\n" + " " * 33, "\r\n"):
        assert not complete(params, "{" + space + rest)
    assert not complete(params, " {" + rest)
    assert not complete(params, "{" + rest + "\n")
