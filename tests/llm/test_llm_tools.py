"""Tools through template, engine, detokenizer and parser: what a model writes comes out as content and as calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from checkpoints import write_checkpoint
from minicpm_cli.engine.engine import EngineRequest, TokenEvent
from minicpm_cli.errors import RequestError
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.settings import LoadOptions
from minicpm_cli.text.tools import gathered, tool_choice_of, tools_of
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.types import (
    Event,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    Timings,
    ToolCall,
    ToolChoice,
    Usage,
)
from tool_templates import HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = tools_of([{"type": "function", "function": WEATHER}, {"type": "function", "function": NOW}])
HELLO = (Message("user", "hello world"),)
CALL = '<function name="weather"><param name="city">Rome</param><param name="days">3</param></function>'
MADE = ("weather", {"city": "Rome", "days": 3})


@pytest.fixture(scope="session")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("five"), "minicpm5-1b")


@pytest.fixture
def model(load, five: Path, tmp_path: Path):
    def opened(source: str = MINICPM5_TOOLS) -> LLM:
        template = tmp_path / "template.jinja"
        template.write_text(source, encoding="utf-8")
        return load(five, chat_template=str(template), ctx=1024)

    return opened


def ask(choice: Any = None, **given: Any) -> Request:
    params = SamplingParams().checked({"max_tokens": 200, "seed": 1, "think": False} | given)
    return Request("a", HELLO, params, tools=TOOLS, tool_choice=tool_choice_of(choice, TOOLS))


def answered(events: Iterable[Event]) -> tuple[str, list[tuple[str, Any]], FinishReason | None]:
    events = list(events)
    text = "".join(e.text for e in events if e.channel == "answer")
    assert all(not e.text for e in events if e.tool_call)
    calls = gathered(e.tool_call for e in events if e.tool_call)
    assert events[-1].usage is not None
    return text, [(call.name, json.loads(call.arguments)) for call in calls], events[-1].finish


@dataclass
class Scripted:
    """An engine that says what it is told to, a token at a time, as far as `limit`."""

    tokens: list[int]
    limit: int = 1000
    said: int = 0

    def generate(self, source: Iterable[EngineRequest | None]) -> Iterator[TokenEvent]:
        for request in source:
            assert request is not None
            assert request.sink is not None
            finish: FinishReason | None = None
            for place, token in enumerate(self.tokens, 1):
                finish = request.sink.push(token) or ("length" if place == self.limit else None)
                self.said = place
                if finish is not None:
                    break
                yield TokenEvent(request.id, token)
            yield TokenEvent(request.id, None, finish=finish or "stop", usage=Usage(1, self.said), timings=Timings())


def says(
    llm: LLM, text: str, request: Request, limit: int = 1000
) -> tuple[str, list[tuple[str, Any]], FinishReason | None]:
    """What becomes of an answer with this text, its tags control tokens where the vocabulary has them."""
    llm._engine = Scripted(llm._prompter.tokenizer.encode(text, control=True), limit)  # type: ignore[assignment]
    return answered(llm.stream([request]))


class TestWhatAModelWrites:
    def test_tags_that_are_control_tokens(self, model) -> None:
        llm = model()
        control = llm._prompter.tokenizer.control_text
        assert {"<function", "</function>", "<param", "</param>"} <= set(control)
        assert says(llm, f"Look. {CALL}\n{CALL}", ask()) == ("Look.", [MADE, MADE], "tool_calls")

    def test_behind_its_thoughts(self, model) -> None:
        assert says(model(), f"hm</think>\n\n{CALL}", ask(think=None)) == ("", [MADE], "tool_calls")

    def test_one_call_where_several_are_not_wanted(self, model) -> None:
        llm = model()
        request = replace(ask(), tool_choice=ToolChoice(parallel=False))
        assert says(llm, f"Look. {CALL} and\n{CALL}", request) == ("Look.", [MADE], "tool_calls")
        assert llm._engine.said < len(llm._engine.tokens)

    def test_text_alone(self, model) -> None:
        assert says(model(), "hello, the world", ask()) == ("hello, the world", [], "stop")

    def test_what_is_no_call_is_content(self, model) -> None:
        wrong = CALL.replace("weather", "other")
        assert says(model(), wrong, ask()) == (wrong, [], "malformed_tool_call")

    def test_cut_by_the_limit(self, model) -> None:
        text, calls, finish = says(model(), CALL, ask(), limit=30)
        assert text
        assert CALL.startswith(text)
        assert (calls, finish) == ([], "length")

    @pytest.mark.parametrize("choice", ["none", None])
    def test_without_tools_control_tokens_are_hidden_as_ever(self, model, choice: str | None) -> None:
        request = ask(choice) if choice else Request("a", HELLO, ask().params)
        text, calls, finish = says(model(), CALL, request)
        assert "<function" not in text
        assert (calls, finish) == ([], "stop")

    @pytest.mark.parametrize(
        ("source", "written"),
        [
            (MINICPM3_TOOLS, "<|tool_call_start|>\n```python\nweather(city='Rome', days=3)\n```\n<|tool_call_end|>"),
            (HERMES_TOOLS, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'),
        ],
    )
    def test_other_forms(self, model, source: str, written: str) -> None:
        assert says(model(source), written, ask()) == ("", [MADE], "tool_calls")

    def test_ids_are_those_of_the_request_and_its_seed(self, model) -> None:
        llm = model()

        def ids(request: Request) -> list[str]:
            llm._engine = Scripted(llm._prompter.tokenizer.encode(CALL + CALL, control=True))
            return [call.id for call in gathered(e.tool_call for e in llm.stream([request]) if e.tool_call)]

        first = ids(ask())
        assert len(set(first)) == 2
        assert ids(ask()) == first
        assert not set(ids(ask(seed=2))) & set(first)


class TestMustCall:
    @pytest.mark.parametrize("name", ["weather", "now"])
    @pytest.mark.parametrize("source", [HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS])
    def test_a_call_is_held_to_the_schema_by_any_weights(self, model, source: str, name: str) -> None:
        """Random weights would write noise."""
        choice = {"type": "function", "function": {"name": name}}
        text, calls, finish = answered(model(source).stream([ask(choice, temperature=1.0)]))
        assert (text, finish) == ("", "tool_calls")
        ((called, arguments),) = calls
        assert called == name
        assert set(arguments) == ({"city", "days"} if name == "weather" else set())
        jsonschema_rs.validate((WEATHER if name == "weather" else NOW)["parameters"], arguments)

    @pytest.mark.parametrize("source", [HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS])
    def test_any_of_them(self, model, source: str) -> None:
        text, calls, finish = answered(model(source).stream([ask("required", temperature=1.0)]))
        assert (text, finish, len(calls)) == ("", "tool_calls", 1)

    @pytest.mark.parametrize("source", [HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS])
    def test_strict_tools_leave_an_answer_as_free_as_ever(self, model, source: str) -> None:
        strict = [{"type": "function", "function": each | {"strict": True}} for each in (WEATHER, NOW)]
        llm, free = model(source), ask(max_tokens=30)
        held = replace(free, tools=tools_of(strict))
        found = [[e.text for e in llm.stream([request]) if e.text] for request in (held, replace(held, id="b"))]
        assert found[0] == found[1]
        *_, last = llm.stream([held])
        assert (last.finish in ("length", "stop"), last.incomplete) == (True, False)
        assert llm._prompter.calling(held).forced.rules  # type: ignore[union-attr]
        assert llm._prompter.calling(free).forced.rules is None  # type: ignore[union-attr]

    def test_what_no_call_can_be_held_to(self, model) -> None:
        schema = {"type": "object", "properties": {"x": {"not": {}}}}
        tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        request = Request("a", HELLO, tools=tools, tool_choice=ToolChoice("required"))
        for source in (HERMES_TOOLS, MINICPM3_TOOLS, MINICPM5_TOOLS):
            with pytest.raises(RequestError, match="not is not supported"):
                model(source).encoded(request)

    def test_xml_is_begun_and_ends_behind_its_call(self, model) -> None:
        llm = model()
        request = ask({"type": "function", "function": {"name": "weather"}}, think=None)
        prompt = llm._prompter.tokenizer.decode(llm.prompt(request))
        assert prompt.endswith('<think>\n\n</think>\n\n<function name="weather">')
        rest = CALL.removeprefix('<function name="weather">')
        assert says(llm, f"{rest} and so on", request) == ("", [MADE], "tool_calls")
        assert llm._engine.said < len(llm._engine.tokens)

    @pytest.mark.parametrize("given", [{"schema": "{}"}, {"regex": "a"}])
    def test_nothing_else_is_possible_beside_it(self, model, given: dict[str, str]) -> None:
        with pytest.raises(RequestError, match="has no place for a"):
            model().encoded(ask("required", **given))


def test_the_demo_model_is_lent_a_way_to_call(five: Path) -> None:
    options = LoadOptions(device="cpu", dtype="fp32", ctx=1024)
    prompter = Prompter.open(options, ModelFiles("demo", five))
    own = prompter.build(Request("a", HELLO, ask().params)).ids
    assert "<tools>" not in prompter.tokenizer.decode(own)
    lent = prompter.tokenizer.decode(prompter.build(ask()).ids)
    assert json.dumps(TOOLS[0].definition) in lent
    calls = prompter.calling(ask())
    assert calls is not None
    assert isinstance(calls.how, Hermes)


class TestRefused:
    def test_a_template_without_tools(self, load) -> None:
        with pytest.raises(RequestError, match=r"chat template .* takes no tools"):
            load().encoded(ask())

    def test_a_template_without_calls(self, load) -> None:
        talk = (*HELLO, Message("assistant", "", tool_calls=(ToolCall("c", "f", "{}"),)))
        with pytest.raises(RequestError, match="tool_calls: this model's chat template"):
            load().encoded(Request("a", talk))

    def test_a_raw_prompt(self, model) -> None:
        with pytest.raises(RequestError, match="a raw prompt has no place"):
            model().encoded(Request("a", "hello", tools=TOOLS))

    def test_a_name_that_python_cannot_call(self, model) -> None:
        tools = tools_of([{"type": "function", "function": {"name": "get-time", "description": ""}}])
        with pytest.raises(RequestError, match="'get-time' can be no name"):
            model(MINICPM3_TOOLS).encoded(Request("a", HELLO, tools=tools))

    def test_others_go_on(self, model) -> None:
        llm = model()
        events = list(
            llm.stream([Request("bad", "raw", tools=TOOLS), Request("good", HELLO, SamplingParams(max_tokens=3))])
        )
        finish = {e.id: e.finish for e in events if e.finish}
        assert finish["bad"] == "error"
        assert finish["good"] in ("length", "stop")
