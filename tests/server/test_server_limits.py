"""Keys, sizes, queues, clients that go away, and how the server ends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from fakes import FakeLLM
from minicpm_cli.errors import MinicpmError, UsageError
from minicpm_cli.server.address import address_of, bind

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def slow(words: int = 1000, delay: float = 0.005, **more: Any) -> FakeLLM:
    return FakeLLM(delay=delay, answer=lambda request: "word " * words, **more)


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@pytest.fixture
def sent() -> Iterator[Any]:
    """sent(port, body): a call whose answer nobody has read yet."""
    connections = []

    def call(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
        connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=20))
        connections[-1].request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        return connections[-1]

    yield call
    for connection in connections:
        connection.close()


def status(name: str, server: Any) -> float:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == name), 0.0)


# ---- keys and sizes -----------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_everywhere_but_at_health(serve) -> None:
    server = serve(api_key="sécret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s\u00e9cret"}):
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT), ("GET", "/openapi.json")):
            answered = server.call(method, path, headers=headers)
            assert answered.status == 401
            assert answered.error["code"] == "invalid_api_key"
    assert server.call("GET", "/health").status == 200
    known = {"Authorization": "Bearer sécret".encode()}
    assert server.call("GET", "/v1/models", headers=known).status == 200


def test_the_official_client_sends_the_key(serve) -> None:
    server = serve(api_key="secret")
    assert server.client("secret").models.list().data[0].id == "fake"
    with pytest.raises(openai.AuthenticationError):
        server.client("guess").models.list()


def test_a_body_that_is_too_large_is_refused_by_its_length_and_by_its_bytes(serve) -> None:
    server = serve(max_body=1000)
    large = {"messages": [{"role": "user", "content": "x" * 2000}]}
    answered = server.post(CHAT, large)
    assert (answered.status, answered.error["type"]) == (413, "invalid_request_error")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    pieces = (b"x" * 100 for _ in range(30))
    connection.request("POST", CHAT, pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    assert "1,000 bytes" in json.loads(response.read())["error"]["message"]
    connection.close()
    assert server.chat().status == 200


# ---- the queue ----------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again(serve, sent) -> None:
    server = serve(slow(seats=1), max_queue=2)
    held = [sent(server.port, {"messages": HELLO})]
    until(lambda: server.llm.running == 1)
    held += [sent(server.port, {"messages": HELLO}) for _ in range(2)]
    until(lambda: server.service.engine.waiting == 2)
    answered = server.chat()
    assert answered.status == 429
    assert 1 <= int(answered.headers["retry-after"]) <= 60
    assert answered.error["type"] == "rate_limit_error"
    for connection in held:
        connection.close()
    until(lambda: not server.service.engine.unfinished)
    assert server.chat(max_tokens=1).status == 200


def test_more_answers_than_ever_fit_into_the_queue_are_no_reason_to_come_again(serve) -> None:
    answered = serve(max_queue=2).chat(n=3)
    assert answered.status == 400


def test_many_clients_get_their_own_answers(serve) -> None:
    server = serve(FakeLLM(delay=0.0005, seats=8, answer=lambda r: r.messages[-1].content + " end " * 20))

    def asked(number: int) -> str:
        messages = [{"role": "user", "content": f"number {number}"}]
        with server.client() as client:
            chunks = client.chat.completions.create(model="fake", messages=messages, stream=number % 2 == 0)
            if number % 2:
                return str(chunks.choices[0].message.content)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(asked, range(32)))
    assert texts == [f"number {number}" + " end " * 20 for number in range(32)]


# ---- clients that go away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_along(serve, sent, stream: bool) -> None:
    server = serve(slow())
    connection = sent(server.port, {"messages": HELLO, "stream": stream})
    until(lambda: server.llm.running == 1)
    if stream:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
    connection.close()
    until(lambda: server.llm.running == 0 and server.llm.cancelled)
    assert server.service.engine.unfinished == 0
    assert status('minicpm_requests_finished_total{reason="cancelled"}', server) == 1
    assert server.chat(max_tokens=1).status == 200


def test_a_client_that_goes_away_while_it_waits_never_reaches_the_model(serve, sent) -> None:
    server = serve(slow(seats=1))
    first = sent(server.port, {"messages": HELLO})
    until(lambda: server.llm.running == 1)
    second = sent(server.port, {"messages": HELLO, "n": 3})
    until(lambda: server.service.engine.waiting == 3)
    second.close()
    until(lambda: server.service.engine.waiting == 0)
    first.close()
    until(lambda: not server.llm.running)
    assert len(server.llm.seen) == 1


def test_one_that_does_not_read_keeps_nobody_waiting(serve) -> None:
    server = serve(FakeLLM(answer=lambda request: "word " * 20_000, context=10**6))
    with socket.create_connection(("127.0.0.1", server.port)) as lazy:
        body = json.dumps({"messages": HELLO, "stream": True, "logprobs": False}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        lazy.sendall(head.encode() + body)
        until(lambda: server.llm.seen)
        assert server.chat(max_tokens=1).status == 200


# ---- the end ------------------------------------------------------------------------------------------------------


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(serve, sent) -> None:
    server = serve(slow(words=100))
    connection = sent(server.port, {"messages": HELLO})
    until(lambda: server.llm.running == 1)
    server.serving.handle_exit(15, None)
    refused = server.chat()
    assert (refused.status, refused.error["code"]) == (503, "stopping")
    assert refused.headers["retry-after"]
    assert server.call("GET", "/health").json == {"status": "draining"}
    answer = json.loads(connection.getresponse().read())
    assert answer["choices"][0]["message"]["content"] == "word " * 100
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert not server.serving.cut
    assert "finishing 1 requests" in server.said[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_cuts_off_and_says_so_to_the_clients(serve, sent, stream: bool) -> None:
    server = serve(slow())
    connection = sent(server.port, {"messages": HELLO, "stream": stream})
    until(lambda: server.llm.running == 1)
    response = connection.getresponse() if stream else None
    server.serving.handle_exit(15, None)
    server.serving.handle_exit(15, None)
    body = (response or connection.getresponse()).read().decode()
    assert "The server is stopping" in body
    assert "[DONE]" not in body
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert server.serving.cut


def test_patience_has_an_end(serve, sent) -> None:
    server = serve(slow(), patience=0.2)
    connection = sent(server.port, {"messages": HELLO})
    until(lambda: server.llm.running == 1)
    server.serving.handle_exit(15, None)
    assert connection.getresponse().status == 503
    server.thread.join(10)
    assert server.serving.cut


def test_without_requests_it_ends_at_once(serve) -> None:
    server = serve()
    server.serving.handle_exit(2, None)
    server.thread.join(5)
    assert not server.thread.is_alive()


class Failing(FakeLLM):
    """Its loop fails as often as `failures` says."""

    failures = 1

    def stream(self, requests):
        events = super().stream(requests)
        for event in events:
            if self.failures:
                self.failures -= 1
                events.close()
                raise RuntimeError("a defect")
            yield event


def test_a_defect_in_the_loop_ends_what_ran_and_the_next_request_finds_a_new_loop(serve, capsys) -> None:
    server = serve(Failing())
    answered = server.chat()
    assert (answered.status, answered.error["code"]) == (500, "internal_error")
    assert server.chat().json["choices"][0]["message"]["content"] == "You said: hello"
    assert "RuntimeError: a defect" in capsys.readouterr().err


def test_a_loop_that_always_fails_ends_the_server_with_an_error(serve) -> None:
    llm = Failing()
    llm.failures = 99
    server = serve(llm)
    for _ in range(3):
        assert server.chat().status in (500, 503)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert isinstance(server.serving.error, MinicpmError)


def test_an_address_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}.*--port 0"):
            bind("127.0.0.1", port)
        assert address_of(sock) == f"http://127.0.0.1:{port}"
    with pytest.raises(UsageError, match="cannot serve at no such host"):
        bind("no such host", 0)


def test_threads_do_not_gather(serve) -> None:
    server = serve()
    server.chat()
    before = threading.active_count()
    for _ in range(20):
        server.chat()
    assert threading.active_count() <= before + 2
