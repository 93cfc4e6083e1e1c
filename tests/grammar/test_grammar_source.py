"""Schemas and expressions that cannot be followed are refused by name, with the place."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from grammar_walks import walk

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.source import LONGEST, check
from minicpm_cli.types import SamplingParams

PLACE = "/properties/a~1b/items"


def refusal(**given: Any) -> str:
    with pytest.raises(RequestError) as refused:
        check(SamplingParams(**given))
    assert refused.value.code == "schema_invalid"
    assert "\n" not in str(refused.value)
    return str(refused.value)


def within(schema: Any, **more: Any) -> str:
    return json.dumps({"type": "object", "properties": {"a/b": {"type": "array", "items": schema}}, **more})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, "not is not supported"),
        ({"if": {}, "then": {}}, "if is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"contains": {}}, "contains is not supported"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties is not supported"),
        ({"$dynamicRef": "#x"}, "$dynamicRef is not supported"),
        ({"type": "array", "items": [{}]}, "items is a list"),
        ({"exclusiveMinimum": True, "minimum": 1}, "exclusiveMinimum is true; it must be a number"),
        ({"type": "strnig"}, "Invalid type: strnig"),
        ({"type": "string", "format": "phone"}, "Unknown format: phone"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": 5}, "'pattern'"),
        ({"required": "a"}, "'required'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
        ({"$ref": "http://example.com/x"}, "http://example.com/x"),
        ({"$ref": "#/$defs/z"}, "/$defs/z"),
        ({"type": "object", "properties": {"k": {}}, "minProperties": 1}, "min/maxProperties"),
    ],
)
def test_what_no_grammar_can_follow_is_refused_with_its_place(schema: Any, said: str) -> None:
    message = refusal(schema=within(schema))
    assert message.startswith(f"the schema at {PLACE}: ")
    assert said in message


def test_a_definition_is_the_place_of_its_own_error() -> None:
    wrong = within({"$ref": "#/$defs/z"}, **{"$defs": {"z": {"type": "bar"}}})
    assert refusal(schema=wrong) == "the schema at /$defs/z: Invalid type: bar"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type":\n "object",}', "line 2, column 11"),
        ("", "not JSON"),
        ('{"const": NaN}', "NaN"),
        ("[" * 5000, "not JSON"),
        ("[1]", "must be an object"),
        ("false", "must be an object"),
        ("{" + " " * LONGEST + "}", "characters"),
        ('{"enum": []}', "the schema at /: "),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ('{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable"),
        ('{"type": "object", "required": ["zz"], "additionalProperties": false}', "'zz'"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, said: str) -> None:
    assert said in refusal(schema=text)


@pytest.mark.parametrize("depth", [100, 1000, 20_000])
def test_a_deep_schema_is_taken_or_refused(depth: int) -> None:
    text = '{"type":"array","items":' * depth + "{}" + "}" * depth
    if depth == 100:
        check(SamplingParams(schema=text))
    else:
        refusal(schema=text)


@pytest.mark.parametrize("regex", ["(a", "(?=x)a", r"\bfoo\b", "a{2,1}", "[z-a]", r"(a)\1"])
def test_a_regex_that_cannot_be_followed_is_refused(regex: str) -> None:
    assert refusal(regex=regex).startswith("the regex ")


def test_both_at_once_are_refused() -> None:
    with pytest.raises(RequestError, match="not both") as refused:
        check(SamplingParams(schema="{}", regex="a"))
    assert refused.value.code == "bad_parameter"


@pytest.mark.parametrize(
    ("regex", "family"),
    [
        (r, f)
        for r in (r"\d{4}-\d\d", "(yes|no|用户)", "^a/b\\n[^x]$", "(?i)ab", "", '"')
        for f in ("minicpm4-0.5b", "minicpm5-1b")
    ],
)
def test_answers_match_a_regex(regex: str, family: str) -> None:
    import re

    for seed in range(5):
        answer = walk(SamplingParams(regex=regex), seed, family)
        assert answer is not None
        assert re.fullmatch(regex, answer, re.ASCII), answer


def test_llguidance_is_not_loaded_where_nothing_asks_for_it() -> None:
    code = (
        "import sys; from minicpm_cli.grammar.grammars import Grammars; from minicpm_cli.types import SamplingParams;"
        "Grammars(None, ()).check(SamplingParams()); assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
