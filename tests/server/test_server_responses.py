"""/v1/responses by the official client: whole and streamed, with thoughts, calls, schemas and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from fakes import FakeLLM
from minicpm_cli.errors import MinicpmError
from minicpm_cli.server.responses import Store
from minicpm_cli.server.responses_items import Items
from minicpm_cli.types import Event, Logprob, Message, Request, ToolCallDelta

SAID = "You said: one two three"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def roles(server: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in server.llm.seen[-1].messages]


def test_an_answer_with_its_counts(serve) -> None:
    server = serve()
    answer = server.client().responses.create(model="fake", input="one two three", instructions="Be brief.")
    assert answer.output_text == SAID
    assert (answer.object, answer.status, answer.model, answer.error) == ("response", "completed", "fake", None)
    assert answer.incomplete_details is None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert roles(server) == [("system", "Be brief."), ("user", "one two three")]


def test_a_stream_leads_to_the_same_answer(serve) -> None:
    client = serve(FakeLLM(delay=0.01, thought=lambda request: "let me see")).client()
    events = list(client.responses.create(model="fake", input="one two three", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        "completed",
    ]
    assert kinds.count("output_text.delta") > 1
    for kind, text in (("reasoning_text", "let me see"), ("output_text", SAID)):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
        (done,) = (event for event in events if event.type == f"response.{kind}.done")
        assert done.text == text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].response.output == done
    assert [item.type for item in done] == ["reasoning", "message"]
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 3
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 2


def test_the_clients_own_stream_gathers_it(serve) -> None:
    with serve().client().responses.stream(model="fake", input="one two three") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == SAID


def test_what_follows_an_answer_is_asked_with_all_before_it_but_the_instructions(serve) -> None:
    server = serve()
    client = server.client()
    first = client.responses.create(model="fake", input="one", instructions="Be brief.")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id, stream=True)
    last = list(second)[-1].response
    assert last.previous_response_id == first.id
    third = client.responses.create(model="fake", input="three", previous_response_id=last.id, instructions="Be long.")
    assert roles(server) == [
        *(("system", "Be long."), ("user", "one"), ("assistant", "You said: one"), ("user", "two")),
        *(("assistant", "You said: two"), ("user", "three")),
    ]
    assert client.responses.retrieve(third.id).output_text == "You said: three"
    assert client.responses.retrieve(last.id) == last


def test_what_is_not_stored_or_was_deleted_is_not_known(serve) -> None:
    client = serve().client()
    kept, not_kept = (client.responses.create(model="fake", input="one", store=store) for store in (True, False))
    client.responses.delete(kept.id)
    for ident in (kept.id, not_kept.id, "resp_no"):
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="store: false"):
                ask(ident)
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            client.responses.create(model="fake", input="two", previous_response_id=ident)


def test_the_oldest_answers_are_forgotten_when_they_take_too_much() -> None:
    store = Store(most=3000)
    for number in range(9):
        store.put((Message("user", "x" * 500),), {"id": str(number)})
    assert list(store._kept) == ["6", "7", "8"]
    store.turns("6")
    store.put((Message("user", "x" * 500),), {"id": "9"})
    assert list(store._kept) == ["8", "6", "9"]  # asked for again: it is young
    store.put((Message("user", "x" * 5000),), {"id": "large"})
    assert (list(store._kept), store._size) == ([], 0)


def test_items_become_turns(serve) -> None:
    server = serve()
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "rain"}, {"type": "input_text", "text": "here?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Well."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "another"}]},
        {"role": "user", "content": "why?"},
    ]  # fmt: skip
    server.client().responses.create(model="fake", input=given)
    assert roles(server) == [
        *(("system", "Be brief."), ("user", "rain\nhere?"), ("assistant", "I look."), ("tool", "wet"), ("tool", "dry")),
        *(("assistant", "No."), ("assistant", "Well."), ("assistant", ""), ("user", "why?")),
    ]
    assert [message.reasoning for message in server.llm.seen[-1].messages[-3:]] == [None, "another", None]
    turn = server.llm.seen[-1].messages[2]
    assert turn.reasoning == "hm"
    assert [(call.id, call.arguments) for call in turn.tool_calls] == [("c1", '{"city": "Oslo"}'), ("c2", "{}")]
    assert [message.tool_call_id for message in server.llm.seen[-1].messages[3:5]] == ["c1", "c2"]


def test_all_values_reach_the_model(serve) -> None:
    server = serve()
    answer = server.client().responses.create(
        model="fake",
        input="one",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=3,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        metadata={"a": "b"},
        extra_body={"top_k": 7, "seed": 5, "stop": ["z"], "think_budget": 9},
    )
    asked = server.llm.seen[-1]
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 3)
    assert (params.seed, params.stop, params.think, params.think_budget) == (5, ("z",), False, 9)
    assert json.loads(params.schema) == {"type": "object"}
    assert [tool.name for tool in asked.tools] == ["weather"]
    assert asked.tools[0].definition["function"]["description"] == "Tells it."
    assert (asked.tool_choice.name, asked.tool_choice.parallel) == ("weather", False)
    assert (answer.temperature, answer.max_output_tokens, answer.metadata) == (0.25, 3, {"a": "b"})
    assert (answer.tools[0].name, answer.parallel_tool_calls, answer.text.format.name) == ("weather", False, "x")


def test_a_cut_answer_is_incomplete(serve) -> None:
    client = serve().client()
    answer = client.responses.create(model="fake", input="one", max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("You said:", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    events = list(client.responses.create(model="fake", input="one", max_output_tokens=2, stream=True))
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "incomplete")


def test_a_parsed_answer(serve) -> None:
    class Person(BaseModel):
        name: str
        age: int

    client = serve(FakeLLM(answer=lambda request: '{"name": "Anna", "age": 31}')).client()
    answer = client.responses.parse(model="fake", input="Who?", text_format=Person)
    assert answer.output_parsed == Person(name="Anna", age=31)


def test_failures_are_told_in_each_way(serve) -> None:
    server = serve(FakeLLM(fail=lambda request: MinicpmError("it broke")))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="it broke"):
            server.client().responses.create(model="fake", input="one", stream=stream)


class Breaking(FakeLLM):
    """Fails after the third word of each answer, and tells a log-probability with each."""

    def _events(self, request: Request) -> Iterator[Event]:
        for number, event in enumerate(super()._events(request)):
            if number == 3 and "break" in str(request.messages):
                yield Event(request.id, finish="error", error=MinicpmError("it broke"))
                return
            yield replace(event, logprobs=(Logprob(number, -0.5, ((number, -0.5), (9, -2.0))),) if event.text else ())


def test_a_stream_that_fails_in_the_middle_says_so_at_its_end(serve) -> None:
    client = serve(Breaking()).client()
    *_, last = client.responses.create(model="fake", input="break here", stream=True)
    assert (last.type, last.response.status, last.response.error.message) == ("response.failed", "failed", "it broke")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_log_probabilities_where_they_are_asked_for(serve) -> None:
    server = serve(Breaking())
    asked = {"model": "fake", "input": "one", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = server.client().responses.create(**asked)
    assert server.llm.seen[-1].params.logprobs == 2
    told = answer.output[0].content[0].logprobs
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in told][:2] == [("<0>", -0.5, 2), ("<1>", -0.5, 2)]
    events = list(server.client().responses.create(**asked, stream=True))
    streamed = [one for event in events if event.type.endswith("text.delta") for one in event.logprobs]
    assert [(one.token, one.logprob) for one in streamed] == [(one.token, one.logprob) for one in told]
    server.client().responses.create(model="fake", input="one")
    assert server.llm.seen[-1].params.logprobs is None


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning"}]}, "input", "no message"),
        ({"input": "x", "n": 2}, "n", "Unrecognized"),
        ({"input": "x", "background": True}, "background", ""),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "none of message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            *("input[0].content[0].type", "'input_text'"),
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, None, "no call before it"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, None, "letters, digits"),
        ({"input": "x", "tool_choice": "required"}, None, "there are no tools"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include", "not supported"),
        ({"input": "x", "top_logprobs": 3}, "top_logprobs", "needs include"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
        ({"input": "x", "model": "other"}, "model", "does not exist"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(serve_once, body: dict[str, Any], param: str, said: str) -> None:
    answered = serve_once(FakeLLM()).post("/v1/responses", body)
    assert answered.status == (404 if "model" in body else 400)
    assert answered.error["param"] == param
    assert said in answered.error["message"]


# ---- items --------------------------------------------------------------------------------------------------------


def told(items: Items, *events: Event) -> list[dict[str, Any]]:
    return [
        each for event in events for each in (*items.add(event), *(items.end(event.finish) if event.finish else ()))
    ]


def call(index: int, arguments: str = "", *, name: str | None = None, void: bool = False) -> Event:
    ident = None if name is None else f"call_{index}"
    return Event("a", tool_call=ToolCallDelta(index, arguments, ident, name, void))


def test_calls_are_items_of_their_own() -> None:
    items = Items("x", lambda ident: b"")
    found = told(
        items, Event("a", "Let me look. "), call(0, name="weather"), call(0, '{"city": '), call(0, '"Oslo"}'),
        call(1, "{}", name="time"), Event("a", finish="tool_calls"),
    )  # fmt: skip
    assert [each["type"].removeprefix("response.") for each in found if each["type"].endswith(("added", "done"))] == [
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done") * 2,
    ]
    assert [each["delta"] for each in found if each["type"].endswith("arguments.delta")] == [
        *('{"city": ', '"Oslo"}', "{}"),
    ]
    _, first, second = items.output
    assert (first["type"], first["call_id"], first["name"], first["arguments"]) == (
        *("function_call", "call_0", "weather"),
        '{"city": "Oslo"}',
    )
    assert second["arguments"] == "{}"
    assert [(made.id, made.name) for made in items.message().tool_calls] == [("call_0", "weather"), ("call_1", "time")]


@pytest.mark.parametrize("later", [False, True])
def test_a_call_that_was_none_is_no_item_of_the_answer(later: bool) -> None:
    items = Items("x", lambda ident: b"")
    text = [Event("a", "[weather(")]
    between = text if later else []
    found = told(
        items, call(0, '{"ci', name="weather"), *between, call(0, void=True), *([] if later else text),
        Event("a", finish="malformed_tool_call"),
    )  # fmt: skip
    assert [item["type"] for item in items.output] == ["message"]
    assert items.message() == Message("assistant", "[weather(")
    places = [each["output_index"] for each in found if each["type"] == "response.output_item.added"]
    assert places == [0, 1]


def test_an_empty_answer_is_a_message() -> None:
    items = Items("x", lambda ident: b"")
    assert told(items, Event("a", finish="stop"))[-1]["type"] == "response.output_item.done"
    assert items.output[0]["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
