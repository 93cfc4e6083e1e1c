"""Tools, choices and calls as clients send them: taken as OpenAI takes them, refused with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpm_cli.errors import RequestError
from minicpm_cli.text.tools import check_results, tool_calls_of, tool_choice_of, tools_of
from minicpm_cli.types import Message, ToolCall, ToolChoice

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": None,
    },
}


def changed(**function: Any) -> list[Any]:
    return [{"type": "function", "function": WEATHER["function"] | function}]  # type: ignore[operator]


class TestTools:
    def test_as_given(self) -> None:
        (tool,) = tools_of([WEATHER])
        assert tool.name == "get_weather"
        assert tool.parameters == WEATHER["function"]["parameters"]  # type: ignore[index]
        assert set(tool.definition["function"]) == {"name", "description", "parameters"}

    @pytest.mark.parametrize("raw", [None, []])
    def test_none(self, raw: Any) -> None:
        assert tools_of(raw) == ()

    def test_without_parameters(self) -> None:
        (tool,) = tools_of([{"type": "function", "function": {"name": "now"}}])
        assert tool.parameters == {"type": "object", "properties": {}}
        assert tool.definition["function"]["parameters"] == tool.parameters, "templates look for them"

    @pytest.mark.parametrize(
        ("raw", "place"),
        [
            ({}, "tools is not a list"),
            (["x"], "tools[0] is not an object"),
            ([{"type": "retrieval"}], "tools[0].type is 'retrieval'"),
            ([{"type": "function"}], "tools[0].function is missing"),
            (changed(name=""), "tools[0].function.name is ''"),
            (changed(name=None), "tools[0].function.name is None"),
            (changed(name="a b"), "tools[0].function.name is 'a b'"),
            (changed(name="a" * 65), "tools[0].function.name"),
            (changed(name="get<|im_end|>"), "tools[0].function.name"),
            (changed(description=3), "tools[0].function.description is not a string"),
            (changed(description="\ud800"), "tools[0].function.description has half a surrogate pair"),
            (changed(parameters=[]), "tools[0].function.parameters is not a JSON schema"),
            (changed(parameters={"type": "string"}), "tools[0].function.parameters.type is 'string'"),
            (changed(parameters={"properties": []}), "tools[0].function.parameters.properties is not an object"),
            (
                changed(parameters={"properties": {"a": 1}}),
                "tools[0].function.parameters.properties.a is not an object",
            ),
            (changed(parameters={"required": "city"}), "tools[0].function.parameters.required is not a list"),
            (changed(parameters={"a": json.loads("[" * 200 + "]" * 200)}), "is nested too deeply"),
            ([*changed(), *changed()], "tools[1].function.name 'get_weather' is the name of an earlier tool"),
        ],
    )
    def test_refused(self, raw: Any, place: str) -> None:
        with pytest.raises(RequestError) as caught:
            tools_of(raw)
        assert caught.value.code == "bad_parameter"
        assert place in str(caught.value)


class TestChoice:
    @pytest.mark.parametrize(
        ("raw", "choice"),
        [
            (None, ToolChoice()),
            ("auto", ToolChoice("auto")),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            ({"type": "function", "function": {"name": "get_weather"}}, ToolChoice("required", "get_weather")),
        ],
    )
    def test_as_given(self, raw: Any, choice: ToolChoice) -> None:
        assert tool_choice_of(raw, tools_of([WEATHER])) == choice

    @pytest.mark.parametrize("raw", ["any", 1, [], {}, {"type": "function"}, {"type": "function", "function": {}}])
    def test_refused(self, raw: Any) -> None:
        with pytest.raises(RequestError, match="tool_choice"):
            tool_choice_of(raw, tools_of([WEATHER]))

    def test_a_tool_that_is_not_there(self) -> None:
        raw = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(RequestError, match=r"'other', which is none of the tools: get_weather"):
            tool_choice_of(raw, tools_of([WEATHER]))

    def test_without_tools(self) -> None:
        assert tool_choice_of("none", ()) == ToolChoice("none")
        with pytest.raises(RequestError, match="there are no tools"):
            tool_choice_of("required", ())


class TestCalls:
    @pytest.mark.parametrize(("arguments", "text"), [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ("", "{}")])
    def test_as_given(self, arguments: Any, text: str) -> None:
        raw = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        assert tool_calls_of(raw, "m") == (ToolCall("c1", "f", text),)

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            ({"id": None}, "m[0].id is not a string"),
            ({"id": ""}, "m[0].id is not a string"),
            ({"type": "x"}, "m[0].type is 'x'"),
            ({"function": None}, "m[0].function is missing"),
            ({"function": {"name": "", "arguments": "{}"}}, "m[0].function.name"),
            (
                {"function": {"name": "f", "arguments": "[1]"}},
                "m[0].function.arguments is not the text of a JSON object",
            ),
            ({"function": {"name": "f", "arguments": "{"}}, "m[0].function.arguments is no JSON"),
            ({"function": {"name": "f", "arguments": "[" * 100_000}}, "m[0].function.arguments is no JSON"),
            ({"function": {"name": "f", "arguments": 3}}, "m[0].function.arguments"),
            ({"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}, "half a surrogate pair"),
        ],
    )
    def test_refused(self, change: dict[str, Any], place: str) -> None:
        raw = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | change
        with pytest.raises(RequestError) as caught:
            tool_calls_of([raw], "m")
        assert place in str(caught.value)

    def test_a_result_belongs_to_a_call(self) -> None:
        call = Message("assistant", "", tool_calls=(ToolCall("c1", "f", "{}"),))
        check_results([Message("user", "q"), call, Message("tool", "r", tool_call_id="c1"), Message("tool", "r")])
        with pytest.raises(RequestError, match=r"messages\[1\].tool_call_id is 'c2'; no call before it"):
            check_results([call, Message("tool", "r", tool_call_id="c2")])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["function", "object"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters", "properties", "id", "x"]), inner)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_taken_or_refused(raw: Any) -> None:
    for read in (tools_of, lambda value: tool_choice_of(value, ()), lambda value: tool_calls_of(value, "m")):
        try:
            read(raw)
        except RequestError as error:
            assert error.code == "bad_parameter"  # noqa: PT017
