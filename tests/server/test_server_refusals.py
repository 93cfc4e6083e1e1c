"""What is wrong with a request is its own fault: OpenAI's error body, never 500, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeLLM
from minicpm_cli.errors import OutOfMemory, RequestError, TemplateError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, **more}


BAD: dict[str, tuple[str, Any, str]] = {  # name: path, body, what the message says
    "no JSON": (CHAT, b"{", "not valid JSON"),
    "no UTF-8": (CHAT, b'{"messages": "\xff"}', "body"),
    "nothing": (CHAT, b"", "body"),
    "deep": (CHAT, b"[" * 100_000, ""),
    "a list": (CHAT, [], "JSON object"),
    "a huge number": (CHAT, b'{"seed": ' + b"9" * 5000 + b"}", ""),
    "no messages": (CHAT, {}, "messages is missing"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "messages as text": (CHAT, {"messages": "hello"}, "messages"),
    "bad role": (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "no role": (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role is missing"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    "content as number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    "half a surrogate pair": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
    "calls of a user": (
        CHAT,
        {"messages": [{"role": "user", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
        "only an assistant calls",
    ),
    "bad arguments of a call": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
        "function.arguments is no JSON",
    ),
    "temperature as text": (CHAT, chat(temperature="hot"), "temperature"),
    "negative temperature": (CHAT, chat(temperature=-1), "temperature"),
    "a penalty too small for logits": (CHAT, chat(repetition_penalty=5e-324), "repetition_penalty"),
    "no number": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    "true as number": (CHAT, chat(max_tokens=True), "max_tokens"),
    "no tokens": (CHAT, chat(max_tokens=0), "max_tokens"),
    "too many choices": (CHAT, chat(n=1000), "n"),
    "empty stop": (CHAT, chat(stop=""), "stop"),
    "unknown field": (CHAT, chat(temprature=1), "Unrecognized request argument supplied: temprature"),
    "unknown template option": (CHAT, chat(chat_template_kwargs={"x": 1}), "chat_template_kwargs.x"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), "logprobs: true"),
    "stream_options alone": (CHAT, chat(stream_options={"include_usage": True}), "stream: true"),
    "schema without one": (CHAT, chat(response_format={"type": "json_schema"}), "schema is missing"),
    "nothing to continue": (CHAT, chat(continue_final_message=True), "none that an assistant began"),
    "no generation prompt": (CHAT, chat(add_generation_prompt=False), "needs continue_final_message"),
    "unknown format": (CHAT, chat(response_format={"type": "yaml"}), "response_format.type"),
    "logit_bias of a text": (CHAT, chat(logit_bias={"five": 1}), "logit_bias"),
    "logit_bias out of range": (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 500}]}, "Shorten the prompt"),
    "too much to write": (CHAT, chat(max_tokens=5000), "max_new 5000"),
    "no prompt": (COMPLETIONS, {}, "prompt is missing"),
    "no prompts": (COMPLETIONS, {"prompt": []}, "prompt"),
    "mixed prompts": (COMPLETIONS, {"prompt": ["x", 5]}, "prompt"),
    "negative token": (COMPLETIONS, {"prompt": [-5]}, "prompt"),
    "echo with logprobs": (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
    "best_of": (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    "neither": ("/tokenize", {}, "either prompt or messages"),
    "both": ("/tokenize", {"prompt": "x", "messages": HELLO}, "either prompt or messages"),
    "no tokens to show": ("/detokenize", {"tokens": "x"}, "tokens"),
}


@pytest.fixture(scope="module")
def server(serve_once):
    return serve_once(FakeLLM(context=300))


STREAMED = [name for name, (path, body, _) in BAD.items() if path.startswith("/v1") and isinstance(body, dict)]
STREAMED.remove("stream_options alone")


@pytest.mark.parametrize(("name", "stream"), [*((name, False) for name in BAD), *((name, True) for name in STREAMED)])
def test_a_malformed_request_is_400_and_says_what_is_wrong(server, name: str, stream: bool) -> None:
    path, body, said = BAD[name]
    if stream:
        body = {**body, "stream": True}
    answered = server.post(path, body)
    assert answered.status == 400, answered.body
    assert answered.error["type"] == "invalid_request_error"
    assert said in answered.error["message"]
    assert answered.headers["content-type"] == "application/json"


def test_the_others_go_on_meanwhile(serve) -> None:
    server = serve(FakeLLM(delay=0.02, answer=lambda request: "word " * 20))
    stream = server.client().chat.completions.create(model="fake", messages=HELLO, stream=True)
    pieces = []
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        assert server.post(CHAT, b"{").status == 400
    assert "".join(pieces) == "word " * 20


def test_without_the_header_the_body_is_not_read_as_json(server) -> None:
    """A page in a browser cannot send it to another origin without asking."""
    answered = server.call("POST", CHAT, chat(), {"Content-Type": "text/plain"})
    assert answered.status == 400
    assert "Content-Type: application/json" in answered.error["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", CHAT, 405)])
def test_paths_that_are_not_there_have_the_same_shape(server, method: str, path: str, status: int) -> None:
    answered = server.call(method, path)
    assert answered.status == status
    assert answered.error["message"]


ENGINE_ERRORS = {
    "request": (RequestError("bad_parameter", "no such schema"), 400, "no such schema"),
    "template": (TemplateError("roles must alternate"), 400, "roles must alternate"),
    "memory": (OutOfMemory("out of memory in a step"), 503, "out of memory"),
    "defect": (ValueError("secret"), 500, "its log says why"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENGINE_ERRORS)
def test_what_the_engine_refuses_has_its_status_also_where_a_stream_was_asked_for(
    serve, name: str, stream: bool
) -> None:
    error, status, said = ENGINE_ERRORS[name]
    answered = serve(FakeLLM(fail=lambda request: error)).chat(stream=stream)
    assert answered.status == status
    assert said in answered.error["message"]


def test_what_a_text_does_to_a_template_is_its_own_fault(serve) -> None:
    class Fragile(FakeLLM):
        def encoded(self, request):
            raise ZeroDivisionError("in the template")

    answered = serve(Fragile()).chat()
    assert answered.status == 400
    assert "in the template" in answered.error["message"]
