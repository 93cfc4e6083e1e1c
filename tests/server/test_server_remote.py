"""run, chat and batch with --server: another program's model, asked like one's own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fakes import FakeLLM
from minicpm_cli.errors import ModelError, ModelNotFound, RequestError, UsageError
from minicpm_cli.llm.remote import RemoteLLM
from minicpm_cli.llm.wire import Wire, body_of
from minicpm_cli.types import Event, Message, Request, SamplingParams

HELLO = (Message("user", "hello"),)


def remote(server: Any, **given: Any) -> RemoteLLM:
    return RemoteLLM.open(server.url, None, None, given)


def ask(ident: str = "a", messages: Any = HELLO, **given: Any) -> Request:
    return Request(ident, messages, SamplingParams().checked(given))


def text(events: list[Event], channel: str = "answer") -> str:
    return "".join(event.text for event in events if event.channel == channel)


def test_an_answer_has_its_thoughts_its_counts_and_its_seed(serve) -> None:
    llm = remote(serve(FakeLLM(thought=lambda request: "hm")))
    assert (llm.info.name, llm.info.context) == ("fake", 4096)
    events = list(llm.stream([ask(seed=5)]))
    assert (text(events), text(events, "think")) == ("You said: hello", "hm")
    last = events[-1]
    assert (last.finish, last.seed) == ("stop", 5)
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    assert llm.totals.generated_tokens == 4
    assert list(llm.stream([ask()]))[-1].seed is not None


def test_only_what_was_set_is_sent() -> None:
    request = ask(temperature=1.0, top_k=5, stop=["x"], think=False, schema='{"type": "object"}')
    _, body = body_of(request, "m", {"temperature"})
    sent = {name: value for name, value in body.items() if name not in ("model", "stream", "stream_options")}
    assert sent == {
        "temperature": 1.0,
        "top_k": 5,
        "stop": ["x"],
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "messages": [{"role": "user", "content": "hello"}],
    }
    assert "temperature" not in body_of(request, "m", ())[1]


def test_many_requests_are_on_their_way_at_once_and_one_that_fails_is_its_own_fault(serve) -> None:
    llm = remote(serve(FakeLLM(delay=0.002, seats=8, context=200)))
    requests = [ask(str(n), f"number {n}") for n in range(40)] + [ask("long", "word " * 300)]
    ended, texts = {}, dict.fromkeys((r.id for r in requests), "")
    for event in llm.stream(iter(requests)):
        texts[event.id] += event.text
        if event.finish:
            ended[event.id] = event
    assert [event.error for event in ended.values() if event.id != "long"] == [None] * 40
    assert [texts[str(n)] for n in range(40)] == [f"You said: number {n}" for n in range(40)]
    assert isinstance(ended["long"].error, RequestError)
    assert ended["long"].error.code == "context_overflow"


def test_a_busy_server_is_asked_again(serve) -> None:
    server = serve(FakeLLM(seats=1, delay=0.01), max_queue=1)
    answers = [e for e in remote(server).stream([ask(str(n)) for n in range(6)]) if e.finish]
    assert sorted(event.id for event in answers) == list("012345")
    assert all(event.finish == "stop" for event in answers)


def test_closing_the_stream_stops_the_server_too(serve) -> None:
    server = serve(FakeLLM(delay=0.005, answer=lambda request: "word " * 2000))
    with closing(remote(server).stream([ask()])) as events:
        next(events)
    for _ in range(400):
        if server.llm.cancelled:
            break
        threading.Event().wait(0.01)
    assert server.llm.cancelled


def test_prompts_are_counted_by_the_server(serve) -> None:
    llm = remote(serve())
    assert len(llm.prompt(ask())) == 2
    assert llm.pieces([5]) == [(5, "<5>")]


def test_what_cannot_be_sent_is_said(serve) -> None:
    error = list(remote(serve()).stream([ask(logprobs=2)]))[-1].error
    assert isinstance(error, RequestError)


def test_an_answer_that_was_begun_goes_on(serve) -> None:
    server = serve(FakeLLM(answer=lambda request: f"after {request.prefill!r}"))
    request = Request("a", HELLO, SamplingParams(), prefill="Sure, ")
    assert text(list(remote(server).stream([request]))) == "after 'Sure, '"
    assert [message.role for message in server.llm.seen[0].messages] == ["user"]


def test_a_model_that_is_not_there_and_a_wrong_key_are_said(serve) -> None:
    server = serve(api_key="secret")
    with pytest.raises(ModelError, match="Incorrect API key"):
        RemoteLLM.open(server.url, "guess", None, {})
    with pytest.raises(ModelNotFound, match=r"no model other.*It has: fake"):
        RemoteLLM.open(server.url, "secret", "other", {})
    assert RemoteLLM.open(f"{server.url}/v1/", "secret", "fake", {}).info.name == "fake"


def test_where_nobody_answers_that_is_said() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(ModelError, match=f"no server answers at 127.0.0.1:{port}.*minicpm serve"):
        RemoteLLM.open(f"127.0.0.1:{port}", None, None, {})
    with pytest.raises(UsageError, match="--server"):
        Wire("ftp://x", None)


@pytest.fixture
def plain_server() -> Iterator[Any]:
    """A server of another make: without /tokenize, and its stream ends before the answer does."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "other"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("tokenize"):
                self._send(404, "not here")
                return
            chunk = {"choices": [{"index": 0, "delta": {"content": "half an"}, "finish_reason": None}]}
            self._send(200, f"data: {json.dumps(chunk)}\n\n: a comment\n\n")

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_stream_that_breaks_off_is_no_answer(plain_server) -> None:
    llm = RemoteLLM.open(plain_server, None, None, {})
    events = []
    with pytest.raises(ModelError, match="ended before its answer did"):
        events.extend(llm.stream([ask()]))


def test_where_a_server_does_not_count_prompts_are_guessed(plain_server) -> None:
    llm = RemoteLLM.open(plain_server, None, None, {})
    assert len(llm.prompt(ask(messages=(Message("user", "x" * 300),)))) == 101
    assert llm.pieces([5]) == [(5, "")]
