"""Tool calls out of an answer's text: the same however it is cut, nothing lost, no text that raises."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minicpm_cli.text.tool_blocks import Forced
from minicpm_cli.text.tool_calls import ToolCallParser, ToolCallStream
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.text.tools import tools_of
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.text.tools_minicpm3 import MiniCPM3
from minicpm_cli.text.tools_minicpm5 import MiniCPM5
from minicpm_cli.types import Channel, FinishReason, ToolCallDelta


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schemas = {key: {"type": kind} if isinstance(kind, str | list) else kind for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}


TOOLS = tools_of(
    [
        tool("weather", city="string", days="integer", metric="boolean"),
        tool("save", path="string", text="string", lines="array", size="number", extra="object", **{"from": "string"}),
        tool(
            "pick",
            either={"anyOf": [{"type": "integer"}, {"type": "null"}]},
            unit={"enum": ["c", "f"]},
            maybe=["string", "null"],
            free={},
        ),
        tool("now"),
    ]
)
FORMATS: dict[str, ToolFormat] = {"minicpm3": MiniCPM3(), "minicpm5": MiniCPM5(), "hermes": Hermes()}

Result = tuple[str, list[tuple[str, Any]], bool]


def gathered(pieces: Iterable[str | ToolCallDelta]) -> tuple[str, list[tuple[str, str]]]:
    content: list[str] = []
    calls: list[tuple[str, str] | None] = []
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
        elif piece.void:
            assert piece == ToolCallDelta(piece.index, void=True)
            assert calls[piece.index] is not None
            calls[piece.index] = None
        elif piece.name is not None:
            assert piece == ToolCallDelta(len(calls), id=f"call_{len(calls)}", name=piece.name)
            calls.append((piece.name, ""))
        else:
            assert piece == ToolCallDelta(len(calls) - 1, piece.arguments)
            assert piece.arguments
            assert calls[-1] is not None
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(content), [call for call in calls if call is not None]


def parse(how: str, text: str | Sequence[str], *, cut: bool = False) -> Result:
    """(content, calls, malformed) of a text, or of the pieces that it comes in."""
    parser = ToolCallParser(FORMATS[how], TOOLS, lambda index: f"call_{index}")
    pieces: list[str | ToolCallDelta] = []
    for part in [text] if isinstance(text, str) else text:
        pieces += parser.feed(part)
    pieces += parser.close(cut=cut)
    content, calls = gathered(pieces)
    assert parser.calls == len(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls], parser.malformed


def five(name: str, **params: str) -> str:
    inside = "".join(f'<param name="{key}">{value}</param>' for key, value in params.items())
    return f'<function name="{name}">{inside}</function>'


def three(code: str) -> str:
    return f"<|tool_call_start|>\n```python\n{code}\n```\n<|tool_call_end|>"


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class TestMiniCPM5:
    @pytest.mark.parametrize(
        ("written", "kind", "value"),
        [
            ("Paris", "city", "Paris"),
            ("  two  blanks ", "city", "  two  blanks "),
            ("007", "city", "007"),
            ("null", "city", "null"),
            ("", "city", ""),
            ("3", "days", 3),
            (" 3\n", "days", 3),
            ("3.0", "days", 3),
            ("three", "days", "three"),
            ("123456789012345678901234567890", "days", 123456789012345678901234567890),
            ("true", "metric", True),
            ("False", "metric", False),
        ],
    )
    def test_a_value_is_what_its_schema_says(self, written: str, kind: str, value: Any) -> None:
        content, calls, malformed = parse("minicpm5", five("weather", **{kind: written}))
        assert (content, calls, malformed) == ("", [("weather", {kind: value})], False)
        assert type(calls[0][1][kind]) is type(value)

    @pytest.mark.parametrize(
        ("written", "name", "value"),
        [
            ('["a", {"b": [1]}]', "lines", ["a", {"b": [1]}]),
            ("['a', None, True]", "lines", ["a", None, True]),
            ('{"a": {"b": "<"}}', "extra", {"a": {"b": "<"}}),
            ("2.50", "size", 2.5),
            ("-1e3", "size", -1000.0),
            ("1e999", "size", "1e999"),
            ("NaN", "size", "NaN"),
            ("7", "unknown", 7),
            ("[1, 2", "lines", "[1, 2"),
            ("__import__('os').system('x')", "lines", "__import__('os').system('x')"),
        ],
    )
    def test_literals(self, written: str, name: str, value: Any) -> None:
        assert parse("minicpm5", five("save", **{name: written}))[1] == [("save", {name: value})]

    def test_the_digits_of_a_number_are_kept(self) -> None:
        parser = ToolCallParser(MiniCPM5(), TOOLS, "call_{}".format)
        _, calls = gathered_plain(parser.feed(five("save", size="0.1000000000000000055")))
        assert calls == ['{"size": 0.1000000000000000055}']

    @pytest.mark.parametrize(
        ("written", "name", "value"),
        [
            ("5", "either", 5),
            ("null", "either", None),
            ("x", "either", "x"),
            ("c", "unit", "c"),
            ("null", "maybe", None),
            ("5", "maybe", "5"),
            ("5", "free", 5),
            ("five", "free", "five"),
        ],
    )
    def test_alternatives(self, written: str, name: str, value: Any) -> None:
        assert parse("minicpm5", five("pick", **{name: written}))[1] == [("pick", {name: value})]

    @pytest.mark.parametrize(
        ("written", "value"),
        [
            ("<![CDATA[a < b && c\n]]>", "a < b && c\n"),
            ("<![CDATA[a[b[0]]>1]]>", "a[b[0]]>1"),
            ("<![CDATA[]]>", ""),
            ("<![CDATA[]]]]>", "]]"),
            ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
            ("\n<![CDATA[x]]>\n", "x"),
            ('<![CDATA[</param></function><function name="now">]]>', '</param></function><function name="now">'),
            ("<![CDATA[&lt;]]>", "&lt;"),
            ("a &lt; b &amp; &#228;&#x1F389; AT&T &copy=1", "a < b & ä🎉 AT&T &copy=1"),
            ("前<![CDATA[<]]>後", "前<後"),
            ("&#xD800;", "&#xD800;"),
        ],
    )
    def test_cdata_and_entities(self, written: str, value: str) -> None:
        assert parse("minicpm5", five("save", text=written)) == ("", [("save", {"text": value})], False)

    @pytest.mark.parametrize(
        "text",
        [
            "<function name='now'></function>",
            '<functionname="now"></function>',
            "<function name=now></function>",
            '<function  name = "now" >\n\n</function>',
        ],
    )
    def test_headers(self, text: str) -> None:
        assert parse("minicpm5", text) == ("", [("now", {})], False)

    def test_a_swallowed_blank_in_a_parameter(self) -> None:
        text = '<function name="weather">\n  <paramname="city">Rome</param>\n</function>'
        assert parse("minicpm5", text) == ("", [("weather", {"city": "Rome"})], False)

    @pytest.mark.parametrize(
        "text",
        [
            five("unknown"),
            '<function name="now"',
            '<function name="now">',
            five("weather", city="<![CDATA[no end"),
            '<function name="weather"><param name="city">Rome</function>',
            '<function name="weather"><param name="city">a</param><param name="city">b</param></function>',
            '<function name="weather">Rome</function>',
            '<function name="weather"><param>Rome</param></function>',
        ],
    )
    def test_malformed(self, text: str) -> None:
        assert parse("minicpm5", f"Look: {text}\n") == (f"Look: {text}\n", [], True)

    @pytest.mark.parametrize(
        "text", ["the <function keyword", "<functions>", "a <function> b </function>", "<function"]
    )
    def test_prose_about_functions(self, text: str) -> None:
        content, calls, _ = parse("minicpm5", text)
        assert (content, calls) == (text, [])

    def test_a_call_behind_one_that_did_not_end(self) -> None:
        text = '<function name="now"> hm ' + five("weather", city="Oslo")
        assert parse("minicpm5", text) == ('<function name="now"> hm ', [("weather", {"city": "Oslo"})], True)


class TestMiniCPM3:
    @pytest.mark.parametrize(
        ("code", "calls"),
        [
            ("weather(city='Paris', days=3)", [("weather", {"city": "Paris", "days": 3})]),
            ('weather(city="Pa\\"ris",metric=true)', [("weather", {"city": 'Pa"ris', "metric": True})]),
            ("now()\nweather(city='''a\nb''')", [("now", {}), ("weather", {"city": "a\nb"})]),
            ("[now(), now()]", [("now", {}), ("now", {})]),
            ("weather('Rome', 2)", [("weather", {"city": "Rome", "days": 2})]),
            ("weather(city=Rome)", [("weather", {"city": "Rome"})]),
            (
                "weather(city=12345, days='4', metric=False)",
                [("weather", {"city": "12345", "days": 4, "metric": False})],
            ),
            ("save(from='a', path='b')", [("save", {"from": "a", "path": "b"})]),
            ("save(from_='a')", [("save", {"from": "a"})]),
            (
                "save(lines=[1, -2.5, None, null], extra={'a': {'b': (1, 2)}})",
                [("save", {"lines": [1, -2.5, None, None], "extra": {"a": {"b": [1, 2]}}})],
            ),
            ("save(text='<|tool_call_end|>')", [("save", {"text": "<|tool_call_end|>"})]),
            ("save(text='\\d', path='世\\u754c')", [("save", {"text": "\\d", "path": "世界"})]),
            ("save(text='a ' 'b')", [("save", {"text": "a b"})]),
            ("weather(city='x')  # it's a comment", [("weather", {"city": "x"})]),
        ],
    )
    def test_calls(self, code: str, calls: list[tuple[str, Any]]) -> None:
        assert parse("minicpm3", three(code)) == ("", calls, False)

    @pytest.mark.parametrize(
        "code",
        [
            "",
            "unknown(a=1)",
            "weather(city=open('/etc/passwd').read())",
            "weather(city=__import__('os').getcwd())",
            "os.system('x')",
            "import os",
            "x = now()",
            "weather(city='a', city='b')",
            "weather('a', city='b')",
            "weather(**{'city': 'a'})",
            "weather(1, 2, 3, 4)",
            "weather(days=2**9**9)",
            "weather(days={1})",
            "weather(days=1e999)",
            "weather(city='no end)",
            "weather(" + "[" * 3000,
            "weather(days=" + "-" * 100_000 + "1)",
            "now(\0)",
        ],
    )
    def test_malformed(self, code: str) -> None:
        text = three(code)
        content, calls, malformed = parse("minicpm3", text)
        assert (content, calls, malformed) == (text, [], True)

    @pytest.mark.parametrize(
        "text",
        [
            "<|tool_call_start|>now()<|tool_call_end|>",
            "<|tool_call_start|>\n```\nnow()\n```\n<|tool_call_end|>",
            "<|tool_call_start|>```python\nnow()```<|tool_call_end|>",
            "<|tool_call_start|>[now()]<|tool_call_end|>",
            "<|tool_call_start|>\n```python\nnow()\n```\n",
            "<|tool_call_start|>\n```python\nnow()\n",
        ],
    )
    def test_fences(self, text: str) -> None:
        assert parse("minicpm3", text) == ("", [("now", {})], False)

    def test_a_comment_with_an_apostrophe_hides_no_end(self) -> None:
        text = three("now()  # it's now") + "\nDone."
        assert parse("minicpm3", text) == ("Done.", [("now", {})], False)

    def test_names_that_python_cannot_call(self) -> None:
        dashed = tools_of([tool("get-time")])[0]
        assert "get-time" in (MiniCPM3().refuses(dashed) or "")
        assert MiniCPM3().refuses(TOOLS[0]) is None


class TestHermes:
    def test_calls(self) -> None:
        text = hermes("weather", city="</tool_call> \"'世", days=3) + "\n" + hermes("now")
        expected = [("weather", {"city": "</tool_call> \"'世", "days": 3}), ("now", {})]
        assert parse("hermes", text) == ("", expected, False)

    @pytest.mark.parametrize(
        "body",
        [
            '{"name": "now", "arguments": {}}',
            '{"name": "now"}',
            '{"name": "now", "arguments": "{}"}',
            '{"name": "now", "parameters": {}}',
            '[{"name": "now", "arguments": {}}]',
        ],
    )
    def test_shapes(self, body: str) -> None:
        assert parse("hermes", f"<tool_call>{body}</tool_call>") == ("", [("now", {})], False)
        assert parse("hermes", f"<tool_call>{body}") == ("", [("now", {})], False)

    @pytest.mark.parametrize(
        "body",
        [
            "",
            "now",
            "[]x",
            "{}",
            '{"name": 1}',
            '{"name": "unknown"}',
            '{"name": "now", "arguments": []}',
            '{"name": "now", "arguments": {"a": NaN}}',
            '{"name": "now", "arguments": {"a": 1e999}}',
            "{" * 100_000,
            "[" * 100_000,
            '{"name": "now", "arguments": {"a": ' + "9" * 5000 + "}}",
        ],
    )
    def test_malformed(self, body: str) -> None:
        text = f"<tool_call>{body}</tool_call>"
        assert parse("hermes", text) == (text, [], True)

    def test_half_a_surrogate_pair_is_escaped(self) -> None:
        parser = ToolCallParser(Hermes(), TOOLS, "call_{}".format)
        pieces = parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>')
        assert gathered_plain(pieces)[1] == ['{"city": "\\ud800"}']

    def test_a_call_behind_a_quotation_that_did_not_end(self) -> None:
        broken = '<tool_call>{"name": "now", "arguments": {"a": "it"s"}}</tool_call>'
        assert parse("hermes", broken + " so " + hermes("now")) == (broken + " so", [("now", {})], True)


def gathered_plain(pieces: Iterable[str | ToolCallDelta]) -> tuple[str, list[str]]:
    content, calls = gathered(pieces)
    return content, [arguments for _, arguments in calls]


class TestContent:
    @pytest.mark.parametrize("how", FORMATS)
    def test_spaces_around_calls_are_no_content(self, how: str) -> None:
        call = {"minicpm3": three("now()"), "minicpm5": five("now"), "hermes": hermes("now")}[how]
        assert parse(how, f"\n{call}\n{call}\n") == ("", [("now", {})] * 2, False)
        assert parse(how, f"Look.\n\n{call}\n") == ("Look.", [("now", {})], False)
        assert parse(how, f"Look.\n{call}\nSo.\n") == ("Look.\n\nSo.", [("now", {})], False)
        assert parse(how, f"{call}\n So.") == ("So.", [("now", {})], False)

    @pytest.mark.parametrize("how", FORMATS)
    def test_without_calls_the_text_is_kept_to_the_letter(self, how: str) -> None:
        text = "  \n a < b <tool> <func <|tool_call_ \n\n"
        assert parse(how, text) == (text, [], False)

    @pytest.mark.parametrize("how", FORMATS)
    def test_a_call_that_the_limit_cuts_is_content(self, how: str) -> None:
        call = {"minicpm3": three("now()"), "minicpm5": five("now"), "hermes": hermes("now")}[how]
        tag = FORMATS[how].tags.close
        text = call.removesuffix(tag)
        assert parse(how, call + text, cut=True) == (text, [("now", {})], True)
        assert parse(how, text + tag[:-1], cut=True) == (text + tag[:-1], [], True)

    def test_content_does_not_wait_longer_than_it_must(self) -> None:
        parser = ToolCallParser(MiniCPM5(), TOOLS, str)
        assert parser.feed("a b <fun") == ["a b"]
        assert parser.feed("ny") == [" <funny"]
        assert parser.feed(" <function") == []
        assert parser.feed(" of") == [" <function of"]


def stream(
    pieces: Sequence[tuple[Channel, str]], finish: FinishReason = "stop", begun: str = ""
) -> tuple[str, str, list[tuple[str, str]], FinishReason]:
    made = ToolCallStream(MiniCPM5(), TOOLS, lambda index: f"call_{index}", Forced(begun))
    out = [*made.feed(pieces), *made.close(finish)]
    thought = "".join(str(piece) for channel, piece in out if channel == "think")
    content, calls = gathered(piece for channel, piece in out if channel == "answer")
    return thought, content, calls, made.finish(finish)


class TestThinking:
    call = five("now")

    def test_behind_a_thought(self) -> None:
        assert stream([("think", "hm"), ("answer", self.call)]) == ("hm", "", [("now", "{}")], "tool_calls")

    def test_one_that_is_only_thought_of_is_a_thought(self) -> None:
        pieces: list[tuple[Channel, str]] = [("think", f"shall I {self.call}?"), ("answer", "No.")]
        assert stream(pieces) == (f"shall I {self.call}?", "No.", [], "stop")
        pieces = [("think", self.call), ("answer", self.call)]
        assert stream(pieces) == (self.call, "", [("now", "{}")], "tool_calls")

    def test_one_that_the_model_forgot_to_leave_its_thoughts_for(self) -> None:
        assert stream([("think", f"I will {self.call}")])[2:] == ([("now", "{}")], "tool_calls")
        assert stream([("think", f"I will {self.call}")], "length")[2:] == ([], "length")

    def test_why_it_ended(self) -> None:
        assert stream([("answer", "Hi")])[3] == "stop"
        assert stream([("answer", five("unknown"))])[1:] == (five("unknown"), [], "malformed_tool_call")
        assert stream([("answer", self.call + five("unknown"))])[2:] == ([("now", "{}")], "malformed_tool_call")
        assert stream([("answer", self.call + "<function name=")], "length")[2:] == ([("now", "{}")], "length")
        assert stream([("answer", self.call)], "cancelled")[2:] == ([("now", "{}")], "cancelled")

    def test_only_the_one_call_that_was_asked_for(self) -> None:
        made = ToolCallStream(
            MiniCPM5(), TOOLS, lambda index: f"call_{index}", Forced('<function name="now">'), one=True
        )
        out = [*made.feed([("answer", f"</function> and {self.call} and <function")]), *made.close("stop")]
        assert made.over
        assert gathered(piece for _, piece in out) == ("", [("now", "{}")])
        assert made.finish("stop") == "tool_calls"

    def test_what_the_prompt_began(self) -> None:
        pieces: list[tuple[Channel, str]] = [("answer", "now"), ("answer", '"></function>')]
        assert stream(pieces, begun='<function name="')[1:] == ("", [("now", "{}")], "tool_calls")


FRAGMENTS = {
    "minicpm3": (
        *(
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            "```python\n",
            "```",
            "now()",
            "weather(",
            "city=",
            "'",
            '"',
            "'''",
        ),
        *("\\", ")", ",", "[", "]", "#", "true", "1", "世", "\n", " ", "<|", "\0", "from=", "{", "}", ":"),
    ),
    "minicpm5": (
        *("<function", "</function>", "<param", "</param>", ' name="', "now", "weather", "city", '">', "<![CDATA["),
        *("]]>", "]]", ">", "<", "&lt;", "&#", "世", " ", "\n", "name", "=", "x", "5", '"'),
    ),
    "hermes": (
        *("<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": ', "{", "}", '"', "\\", "[", "]", ":", ","),
        *('"city"', "世", " ", "\n", "NaN", "1", "<tool_", "</"),
    ),
}


def texts(how: str) -> st.SearchStrategy[str]:
    whole = {
        "minicpm3": [three("now()"), three("weather(city='a\\'b')\nnow()")],
        "minicpm5": [five("now"), five("save", text="<![CDATA[]]>]]>", size="1")],
        "hermes": [hermes("now"), hermes("weather", city='"</tool_call>')],
    }[how]
    parts = st.sampled_from(FRAGMENTS[how]) | st.sampled_from(whole) | st.text(max_size=3)
    return st.lists(parts, max_size=14).map("".join)


class TestHoweverItIsCut:
    @pytest.mark.parametrize("how", FORMATS)
    @given(data=st.data(), cut=st.booleans())
    def test_pieces_give_what_the_whole_gives(self, how: str, data: st.DataObject, cut: bool) -> None:
        text = data.draw(texts(how))
        whole = parse(how, text, cut=cut)
        assert parse(how, list(text), cut=cut) == whole
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert parse(how, parts, cut=cut) == whole

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            ("minicpm3", "a " + three("weather(city='''it's''', days=1)") + " b"),
            ("minicpm5", "a " + five("save", text="<![CDATA[a]]>b]]>", size=" 1 ") + five("now") + " b"),
            ("hermes", "a " + hermes("weather", city='q"\\</tool_call>') + " b"),
        ],
    )
    def test_at_every_place(self, how: str, text: str) -> None:
        whole = parse(how, text)
        assert whole[1]
        assert not whole[2]
        for place in range(len(text) + 1):
            assert parse(how, [text[:place], text[place:]]) == whole

    @pytest.mark.parametrize("how", FORMATS)
    @given(data=st.data())
    def test_without_calls_nothing_is_lost(self, how: str, data: st.DataObject) -> None:
        text = data.draw(texts(how))
        content, calls, malformed = parse(how, text, cut=True)
        if not calls:
            assert content == text
        assert malformed or not calls or len(content) < len(text)

    @pytest.mark.parametrize("how", FORMATS)
    @given(text=st.text())
    @example("<|tool_call_start|>" * 3)
    def test_any_text(self, how: str, text: str) -> None:
        tag = FORMATS[how].tags.open
        for text_ in (text, tag + text, tag + text + FORMATS[how].tags.close):
            parse(how, text_)

    @pytest.mark.parametrize("how", FORMATS)
    def test_many_openings_take_no_long_time(self, how: str) -> None:
        text = FORMATS[how].tags.open * 3000
        assert parse(how, text)[0] == text
