"""Tool calls as the official client sends and reads them; how the model writes them is tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fakes import FakeLLM
from minicpm_cli.llm.remote import RemoteLLM
from minicpm_cli.text.tools import gathered, tools_of
from minicpm_cli.types import Event, Message, Request, Timings, ToolCall, ToolCallDelta, ToolChoice, Usage

ASKED = [{"role": "user", "content": "Weather in Paris and Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}]


class Calling(FakeLLM):
    """Says a word, and calls twice where it may."""

    def _events(self, request: Request) -> Iterator[Event]:
        called = request.tools and request.tool_choice.mode != "none" and request.messages[-1].role != "tool"
        if not called:
            yield from super()._events(request)
            return
        yield Event(request.id, "Looking.")
        for place, city in enumerate(("Paris", "Rome")):
            yield Event(request.id, tool_call=ToolCallDelta(place, id=f"call_{place}", name="weather"))
            yield Event(request.id, tool_call=ToolCallDelta(place, '{"city": '))
            yield Event(request.id, tool_call=ToolCallDelta(place, f'"{city}"}}'))
        yield Event(request.id, finish="tool_calls", usage=Usage(3, 9), timings=Timings())


def test_calls_come_whole(serve) -> None:
    choice = serve(Calling()).client().chat.completions.create(model="fake", messages=ASKED, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    calls = choice.message.tool_calls
    assert [(c.id, c.type, c.function.name) for c in calls] == [
        ("call_0", "function", "weather"),
        ("call_1", "function", "weather"),
    ]
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Paris"}, {"city": "Rome"}]


def test_calls_come_in_pieces(serve) -> None:
    client = serve(Calling()).client()
    arguments, names, finishes = ["", ""], [], []
    for chunk in client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, stream=True):
        finishes.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments[call.index] += call.function.arguments or ""
            names += [call.function.name] if call.function.name else []
    assert [json.loads(text)["city"] for text in arguments] == ["Paris", "Rome"]
    assert names == ["weather", "weather"]
    assert finishes[-1] == "tool_calls"


def test_results_go_back_to_the_model(serve) -> None:
    server = serve(Calling())
    client = server.client()
    said = client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls]
    history = [*ASKED, said.model_dump(), *results]
    answer = client.chat.completions.create(model="fake", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "You said: sunny"
    sent = server.llm.seen[-1].messages
    assert [call.arguments for call in sent[1].tool_calls] == ['{"city": "Paris"}', '{"city": "Rome"}']
    assert [message.tool_call_id for message in sent[2:]] == ["call_0", "call_1"]


def test_what_may_be_called_is_passed_on(serve) -> None:
    server = serve(Calling())
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, mode, name in (("none", "none", None), ("required", "required", None), (named, "required", "weather")):
        server.client().chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, tool_choice=choice)
        request = server.llm.seen[-1]
        assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
        assert [tool.name for tool in request.tools] == ["weather"]
        assert request.tool_choice.parallel


def test_one_call_at_a_time_is_passed_on(serve) -> None:
    server = serve(Calling())
    server.client().chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, parallel_tool_calls=False)
    assert server.llm.seen[-1].tool_choice == ToolChoice(parallel=False)


class GivingUp(FakeLLM):
    """Begins a call that is none."""

    def _events(self, request: Request) -> Iterator[Event]:
        yield Event(request.id, tool_call=ToolCallDelta(0, id="call_0", name="weather"))
        yield Event(request.id, tool_call=ToolCallDelta(0, '{"city": '))
        yield Event(request.id, tool_call=ToolCallDelta(0, void=True))
        yield Event(request.id, '<tool_call>{"name": "weather", "arguments": {"city": x')
        yield Event(request.id, finish="malformed_tool_call", usage=Usage(3, 9), timings=Timings())


def test_a_call_that_turned_out_to_be_none_is_content(serve) -> None:
    server = serve(GivingUp())
    client = server.client()
    choice = client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "malformed_tool_call")
    assert choice.message.content.startswith("<tool_call>")
    chunks = list(client.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS, stream=True))
    said = [call.function.arguments for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert said == ["", '{"city": ']
    assert chunks[-1].choices[0].finish_reason == "malformed_tool_call"
    llm = RemoteLLM.open(server.url, None, None, {})
    events = list(llm.stream([Request("a", (Message("user", "Weather?"),), tools=tools_of(TOOLS))]))
    assert gathered(event.tool_call for event in events if event.tool_call) == ()
    assert "".join(event.text for event in events).startswith("<tool_call>")


BAD = {
    "no truth value": {"tools": TOOLS, "parallel_tool_calls": "no"},
    "no function": {"tools": [{"type": "function"}]},
    "bad name": {"tools": [{"type": "function", "function": {"name": "no spaces please"}}]},
    "parameters as text": {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
    "choice without tools": {"tool_choice": "required"},
    "unknown choice": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
    "result of no call": {"messages": [*ASKED, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
    "half a surrogate pair": {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
}


@pytest.fixture(scope="module")
def server(serve_once):
    return serve_once(Calling())


def test_tools_are_counted_among_the_tokens_of_a_prompt(serve) -> None:
    server = serve(Calling())
    seen = []
    server.llm.prompt = lambda request: seen.append(request) or [1, 2]
    llm = RemoteLLM.open(server.url, None, None, {})
    assert llm.prompt(Request("a", (Message("user", "q"),), tools=tools_of(TOOLS))) == [1, 2]
    assert [tool.name for tool in seen[-1].tools] == ["weather"]
    assert server.post("/tokenize", {"messages": ASKED, "tools": [{"type": "x"}]}).status == 400


@pytest.mark.parametrize("name", BAD)
def test_bad_tools_are_the_clients_fault(server, name: str) -> None:
    answered = server.chat(**BAD[name])
    assert answered.status == 400
    assert answered.error["type"] == "invalid_request_error"


def test_a_model_that_another_program_serves_is_given_tools_too(serve) -> None:
    server = serve(Calling())
    llm = RemoteLLM.open(server.url, None, None, {})
    tools = tools_of(TOOLS)
    request = Request("a", (Message("user", "Weather?"),), tools=tools, tool_choice=ToolChoice("required", "weather"))
    events = list(llm.stream([request]))
    made = [event.tool_call for event in events if event.tool_call]
    assert "".join(piece.arguments for piece in made if piece.index == 1) == '{"city": "Rome"}'
    assert (made[0].id, made[0].name, events[-1].finish) == ("call_0", "weather", "tool_calls")
    assert server.llm.seen[-1].tool_choice == request.tool_choice
    calls = (ToolCall("call_0", "weather", '{"city": "Paris"}'),)
    history = (*request.messages, Message("assistant", "", None, calls), Message("tool", "rain", None, (), "call_0"))
    assert "".join(e.text for e in llm.stream([Request("b", history, tools=tools)])) == "You said: rain"
    assert server.llm.seen[-1].messages == history
