"""Whatever the rules of a call let through is a call, and its arguments are of the tool's schema (jsonschema-rs)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from grammar_walks import FAMILIES, walk

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.calls import call_grammar
from minicpm_cli.grammar.element import element_rules
from minicpm_cli.text.tool_blocks import Forced
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.text.tools import tools_of
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.text.tools_minicpm3 import MiniCPM3
from minicpm_cli.text.tools_minicpm5 import MiniCPM5
from minicpm_cli.types import SamplingParams

FORMATS: dict[str, ToolFormat] = {"minicpm3": MiniCPM3(), "minicpm5": MiniCPM5()}
STRING = {"type": "string", "maxLength": 4}
PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string", "minLength": 2, "maxLength": 5},
    "zip": {"type": "string", "pattern": r"^\d{5}$"},
    "part": {"type": "string", "pattern": "[0-9]/", "maxLength": 6},
    "unit": {"enum": ["c", "f", "a<b", "d&e", 'g"h', "i\nj"]},
    "maybe": {"anyOf": [{"enum": ["left", "right"]}, {"type": "null"}]},
    "kinds": {"type": ["string", "null"], "maxLength": 3, "enum": ["x", None]},
    "const": {"const": "only"},
    "days": {"type": "integer", "minimum": 0, "maximum": 99},
    "size": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1},
    "metric": {"type": "boolean"},
    "number": {"enum": [1, 2.5, None, True]},
    "either": {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "boolean"}]},
    "lines": {"type": "array", "items": STRING, "maxItems": 2},
    "place": {"$ref": "#/$defs/place"},
    "merged": {"allOf": [{"$ref": "#/$defs/place"}]},
    "from": {"type": "string", "maxLength": 3},
}
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}, "name": STRING},
    "required": ["x"],
    "additionalProperties": False,
}


def tool(name: str, *names: str, required: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: PROPERTIES[key] for key in names}, "required": list(required)}
    schema |= {"$defs": {"place": PLACE}, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def called(how: str, raw: dict[str, Any], forced: Forced, seed: int) -> Any:
    answer = walk(SamplingParams(), seed, FAMILIES[how == "minicpm5"], rules=forced.rules)
    assert answer is not None
    tools = {each.name: each for each in tools_of([raw])}
    ((name, arguments),) = FORMATS[how].parse(forced.begun + answer + forced.ended, tools)
    assert name == raw["function"]["name"]
    return json.loads(arguments)


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", PROPERTIES)
def test_each_argument_is_of_its_schema(how: str, name: str) -> None:
    raw = tool("f", name, required=(name,))
    forced = FORMATS[how].forced(tools_of([raw]))
    for seed in range(6):
        arguments = called(how, raw, forced, seed)
        jsonschema_rs.validate(raw["function"]["parameters"], arguments)


@pytest.mark.parametrize("how", FORMATS)
def test_what_is_optional_may_be_left_out(how: str) -> None:
    raw = tool("f", "metric", "days", "unit", required=("days",))
    forced = FORMATS[how].forced(tools_of([raw]))
    found = {tuple(called(how, raw, forced, seed)) for seed in range(40)}
    assert found >= {("days",), ("metric", "days"), ("days", "unit"), ("metric", "days", "unit")}
    assert all("days" in names for names in found)


@pytest.mark.parametrize("how", FORMATS)
def test_nothing_to_say(how: str) -> None:
    raw = {"type": "function", "function": {"name": "now"}}
    assert called(how, raw, FORMATS[how].forced(tools_of([raw])), 0) == {}


@pytest.mark.parametrize("how", FORMATS)
def test_any_of_several_tools(how: str) -> None:
    raws = [tool("first", "metric", required=("metric",)), tool("second", "days", required=("days",))]
    tools = tools_of(raws)
    forced = FORMATS[how].forced(tools)
    found = set()
    for seed in range(12):
        answer = walk(SamplingParams(), seed, FAMILIES[how == "minicpm5"], rules=forced.rules)
        text = f"{forced.begun}{answer}{forced.ended}"
        ((name, arguments),) = FORMATS[how].parse(text, {each.name: each for each in tools})
        jsonschema_rs.validate(raws[name == "second"]["function"]["parameters"], json.loads(arguments))
        found.add(name)
    assert found == {"first", "second"}


def test_a_required_argument_that_nothing_is_said_of() -> None:
    raw = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["x"]}}}
    for how, form in FORMATS.items():
        assert set(called(how, raw, form.forced(tools_of([raw])), 1)) == {"x"}


@pytest.mark.parametrize("how", FORMATS)
def test_what_cannot_be_held_to_is_refused(how: str) -> None:
    beyond = tools_of([tool("f", "days", minProperties=1)])
    with pytest.raises(RequestError, match="a call of f cannot be held to minProperties"):
        FORMATS[how].forced(beyond)
    unknown = tools_of(
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}]
    )
    with pytest.raises(RequestError, match=r"tools: f\.x: the schema at /: not is not supported"):
        call_grammar(FORMATS[how].forced(unknown).rules or "", {})


def test_a_name_that_python_cannot_write() -> None:
    schema = {"type": "object", "properties": {"user-id": {"type": "string"}}}
    tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(RequestError, match="'user-id' can be no name"):
        MiniCPM3().forced(tools)
    assert 'name=\\"user-id\\"' in (MiniCPM5().forced(tools).rules or "")


@pytest.mark.parametrize(
    ("pattern", "good"), [("^(a|b)$", True), ("^[a|b]$", True), (r"^a\|b$", True), ("^a|b$", False)]
)
def test_alternatives_beside_anchors(pattern: str, good: bool) -> None:
    schema = {"type": "string", "pattern": pattern}
    if good:
        element_rules("x", schema)
    else:
        with pytest.raises(RequestError, match="put them in brackets"):
            element_rules("x", schema)


# ---- calls that need not be made ----------------------------------------------------------------------------------

ALL: dict[str, ToolFormat] = {**FORMATS, "hermes": Hermes()}
RAWS = [tool("first", "unit", "days", required=("days",)), tool("second", "text", required=("text",))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ALL)
def test_what_begins_as_a_call_is_one(how: str, family: str) -> None:
    form, tools = ALL[how], {each.name: each for each in tools_of(RAWS)}
    found = set()
    for seed in range(8):
        begun = f"Let me see < 3.\n{form.tags.open}"
        rules = form.held(list(tools.values()))
        text = walk(SamplingParams(), seed, family, rules=rules, begun=begun, until=form.tags.close)
        assert text is not None
        ((name, arguments),) = form.parse(text[text.index(form.tags.open) :], tools)
        jsonschema_rs.validate(RAWS[name == "second"]["function"]["parameters"], json.loads(arguments))
        found.add(name)
    assert found == {"first", "second"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ALL)
def test_all_else_may_be_said_and_may_end(how: str, family: str) -> None:
    form = ALL[how]
    text = f"A <tag>, {{braces}}, {form.tags.open[:-1]}\n\nö 世"
    rules = form.held(tools_of(RAWS))
    said = walk(SamplingParams(), 1, family, rules=rules, begun=text, until=text)
    assert said is not None
    assert said.removeprefix(" ") == text, "SentencePiece begins with a blank"
    call = walk(SamplingParams(), 1, family, rules=rules, begun=form.tags.open, until=form.tags.close)
    assert call is not None
    twice = f"so {call.removeprefix(' ')} and {call.removeprefix(' ')}."
    said = walk(SamplingParams(), 1, family, rules=rules, begun=twice, until=twice)
    assert said is not None
    assert said.removeprefix(" ") == twice
    assert walk(SamplingParams(), 1, family, rules=rules, begun=twice) is not None
