"""Arguments of a call before it is whole: piece by piece, and never another text than that of the whole call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpm_cli.text.tool_blocks import Forced
from minicpm_cli.text.tool_calls import ToolCallParser, ToolCallStream, whole
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.text.tools import gathered, tools_of
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.text.tools_minicpm3 import MiniCPM3
from minicpm_cli.text.tools_minicpm5 import MiniCPM5
from minicpm_cli.types import ToolCallDelta

PROPERTIES = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "size": {"type": "number"},
    "whole": {"type": "integer"},
    "lines": {"type": "array"},
    "extra": {"type": "object"},
    "from": {"type": "string"},
    "free": {},
}
SAVE = {"type": "function", "function": {"name": "save", "parameters": {"type": "object", "properties": PROPERTIES}}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = tools_of([SAVE, NOW])
FORMATS: dict[str, ToolFormat] = {"minicpm3": MiniCPM3(), "minicpm5": MiniCPM5(), "hermes": Hermes()}


def begun(index: int, name: str = "save") -> ToolCallDelta:
    return ToolCallDelta(index, id=f"call_{index}", name=name)


def said(how: str, *pieces: str) -> list[list[str | ToolCallDelta]]:
    """What each piece, and the end, brings."""
    parser = ToolCallParser(FORMATS[how], TOOLS, "call_{}".format)
    return [*(parser.feed(piece) for piece in pieces), parser.close(cut=False)]


def test_json_arguments_come_as_they_are_written() -> None:
    pieces = (
        "Look.\n<tool_call>",
        '\n{"name": "sa',
        've"',
        ', "argum',
        'ents": {"text": "Hel',
        "lo, \\u00e4",
        '\\n w\\"',
        'orld", "size": 12',
        '3, "lines": [1,{"a":nu',
        "ll}]}}\n</tool_call>",
    )
    assert said("hermes", *pieces) == [
        ["Look."],
        [],
        [begun(0)],
        [],
        [ToolCallDelta(0, '{"text": "Hel')],
        [ToolCallDelta(0, "lo, ä")],
        [ToolCallDelta(0, '\\n w\\"')],
        [ToolCallDelta(0, 'orld", "size": ')],
        [ToolCallDelta(0, '123, "lines": [1, {"a": ')],
        [ToolCallDelta(0, "null}]}")],
        [],
    ]


def test_a_parameter_in_xml_comes_when_its_end_is_there() -> None:
    pieces = (
        '<function name="save"',
        '><param name="text">a</par',
        'am><param name="lines"><![CDATA[["</param>',
        '"]]]></param',
        "></function>",
    )
    assert said("minicpm5", *pieces) == [
        [],
        [begun(0)],
        [ToolCallDelta(0, '{"text": "a"')],
        [],
        [ToolCallDelta(0, ', "lines": ["</param>"]}')],
        [],
    ]


def test_an_argument_in_python_comes_when_what_ends_it_is_there() -> None:
    pieces = (
        "<|tool_call_start|>\n```python\nsa",
        "ve(",
        "text='a, b)'",
        ",",
        " lines=[1, (2,",
        "), 3]",
        ")",
        "\nno",
        "w()",
        "\n```\n<|tool_call_end|>",
    )
    assert said("minicpm3", *pieces) == [
        [],
        [begun(0)],
        [],
        [ToolCallDelta(0, '{"text": "a, b)"')],
        [],
        [],
        [ToolCallDelta(0, ', "lines": [1, [2], 3]')],
        [],
        [ToolCallDelta(0, "}"), begun(1, "now"), ToolCallDelta(1, "{")],
        [ToolCallDelta(1, "}")],
        [],
    ]


@pytest.mark.parametrize(
    ("how", "pieces"),
    [
        ("hermes", ('<tool_call>{"name": "save", "arguments": {"text": "a', '"b"}}</tool_call>')),
        ("hermes", ('<tool_call>{"name": "save", "arguments": {"text": "a"}, "name": "now"}</tool_call>', "")),
        ("hermes", ('<tool_call>{"name": "save", "arguments": {"size": 1', ", }}</tool_call>")),
        ("minicpm5", ('<function name="save"><param name="text">a</param>', "b</function>")),
        ("minicpm3", ("<|tool_call_start|>save(text='a', ", "'b')<|tool_call_end|>")),
    ],
)
def test_one_that_turns_out_to_be_none_is_given_up_and_is_content(how: str, pieces: tuple[str, str]) -> None:
    out = [piece for part in said(how, *pieces) for piece in part]
    assert out[0] == begun(0)
    assert [piece for piece in out if isinstance(piece, str)] == ["".join(pieces)]
    assert out[-2] == ToolCallDelta(0, void=True)
    assert gathered(piece for piece in out if isinstance(piece, ToolCallDelta)) == ()


def test_the_call_behind_one_that_was_given_up_has_a_number_of_its_own() -> None:
    broken, good = (
        '<tool_call>{"name": "now", "arguments": {"a"}}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
    )
    pieces = [piece for part in said("hermes", broken, good) for piece in part if isinstance(piece, ToolCallDelta)]
    assert [(call.id, call.arguments) for call in gathered(pieces)] == [("call_1", "{}")]
    assert [piece.index for piece in whole(pieces)] == [0, 0]


@pytest.mark.parametrize("how", FORMATS)
def test_the_answer_that_must_be_one_call_has_no_second_one(how: str) -> None:
    once = {
        "hermes": '<tool_call>{"name": "save", "arguments": {"text": "a"}}</tool_call>',
        "minicpm3": "<|tool_call_start|>save(text='a')\nnow()<|tool_call_end|>",
        "minicpm5": '<function name="save"><param name="text">a</param></function>',
    }[how]
    stream = ToolCallStream(FORMATS[how], TOOLS, "call_{}".format, Forced(), one=True)
    text = f"Look. {once}\n{once} So."
    out = [piece for char in text for piece in stream.feed([("answer", char)])] + stream.close("stop")
    made = [piece for _, piece in out]
    assert "".join(piece for piece in made if isinstance(piece, str)) == "Look."
    assert [(c.name, c.arguments) for c in gathered(_deltas(made))] == [("save", '{"text": "a"}')]
    assert stream.finish("stop") == "tool_calls"


def _deltas(pieces: Iterable[str | ToolCallDelta]) -> list[ToolCallDelta]:
    return [piece for piece in pieces if isinstance(piece, ToolCallDelta)]


# ---- any arguments ------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ["</tool_call>", '"', "'''", "]]>"]
)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = TEXTS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6)
FITTING = {
    **dict.fromkeys(("path", "text", "from"), TEXTS),
    "size": NUMBERS,
    "whole": st.integers(),
    "lines": st.lists(VALUES, max_size=3),
    "free": VALUES,
    "extra": st.dictionaries(TEXTS, VALUES, max_size=3),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=FITTING)


def written(how: str, arguments: dict[str, Any], data: st.DataObject | None) -> str:
    if how == "hermes":
        spaces = data.draw(st.sampled_from([None, 1])) if data else None
        raw = json.dumps(arguments, ensure_ascii=data is None or data.draw(st.booleans()), indent=spaces)
        return f'<tool_call>\n{{"name": "save", "arguments": {raw}}}\n</tool_call>'
    if how == "minicpm5":
        return f'<function name="save">{"".join(map(_param, arguments.items()))}</function>'
    inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"<|tool_call_start|>\n```python\nsave({inside})\n```\n<|tool_call_end|>"


def _param(item: tuple[str, Any]) -> str:
    text = item[1] if isinstance(item[1], str) else json.dumps(item[1], ensure_ascii=False)
    return f'<param name="{item[0]}"><![CDATA[{text}]]></param>'


def expected(how: str, text: str) -> list[tuple[str, str]]:
    return FORMATS[how].parse(text, {tool.name: tool for tool in TOOLS})


@pytest.mark.parametrize("how", FORMATS)
@given(arguments=ARGUMENTS, data=st.data())
def test_the_pieces_are_the_whole_call(how: str, arguments: dict[str, Any], data: st.DataObject) -> None:
    text = written(how, arguments, data)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    halves = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for pieces in (list(text), halves):
        deltas = _deltas(piece for part in said(how, *pieces) for piece in part)
        assert not any(piece.void for piece in deltas)
        assert [(call.name, call.arguments) for call in gathered(deltas)] == expected(how, text)


@pytest.mark.parametrize("how", ["hermes", "minicpm3"])
def test_each_argument_is_there_before_the_next_one(how: str) -> None:
    """Of a call that is written letter by letter."""
    text = {
        "hermes": '<tool_call>{"name": "save", "arguments": {"path": "a", "text": "b", "size": 1}}</tool_call>',
        "minicpm3": '<|tool_call_start|>save(path="a", text="b", size=1)<|tool_call_end|>',
    }[how]
    parser = ToolCallParser(FORMATS[how], TOOLS, str)
    so_far = ""
    for place, char in enumerate(text):
        so_far += "".join(piece.arguments for piece in _deltas(parser.feed(char)))
        for name, value in (("path", '"a"'), ("text", '"b"'), ("size", "1")):
            before = text[: place + 1].partition(name)[2]
            if any(end in before[4:] for end in (",", "}", ")")):
                assert f'"{name}": {value}' in so_far


def parts_of(text: str) -> Sequence[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]


@pytest.mark.parametrize("how", FORMATS)
def test_a_long_argument_takes_no_long_time(how: str) -> None:
    """16,000 pieces: reading each time from the beginning would take a minute."""
    text = "".join(written(how, {"text": "it is (so), so. " * 4000}, None))
    parser = ToolCallParser(FORMATS[how], TOOLS, str)
    for part in parts_of(text):
        parser.feed(part)
    assert parser.calls == 1
