"""Streams on their way to the socket: straight, or gathered for a client that reads slowly."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from fakes import FakeLLM
from minicpm_cli.server.inbox import Inbox
from minicpm_cli.server.outlet import Outlet, outlet_of
from minicpm_cli.types import Event

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
WORDS = 30_000


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def asked(text: str = "hello", **more: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True, **more}).encode()
    return HEAD.format(len(body)).encode() + body


def deltas(events: list[bytes]) -> list[str]:
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events if b"[DONE]" not in event]
    return [text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content"))]


def test_one_that_reads_late_gets_everything_in_order_in_fewer_pieces(serve) -> None:
    """What it has not read is gathered: the socket's buffer is full long before the model is done."""
    numbers = " ".join(map(str, range(WORDS)))
    server = serve(FakeLLM(answer=lambda request: numbers, context=10**6))
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.connect(("127.0.0.1", server.port))
        late.sendall(asked())
        until(lambda: server.llm.totals.generated_tokens == WORDS)
        assert server.chat(max_tokens=1).status == 200  # and nobody waits for it
        response = http.client.HTTPResponse(late)
        response.begin()
        raw = response.read()
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    pieces = deltas(events[:-2])
    assert "".join(pieces) == numbers
    assert len(pieces) < WORDS * 0.9


def test_one_that_reads_at_once_gets_a_chunk_a_token(serve) -> None:
    server = serve(FakeLLM(answer=lambda request: "a b c d e f g h", delay=0.002))
    answered = server.chat(stream=True)
    assert deltas(answered.body.split(b"\n\n")[:-2]) == ["a", " b", " c", " d", " e", " f", " g", " h"]


def test_a_client_of_http_1_0_gets_no_chunks(serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as old:
        old.sendall(asked().replace(b"HTTP/1.1", b"HTTP/1.0"))
        raw = b"".join(iter(lambda: old.recv(65536), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert "".join(deltas(body.split(b"\n\n")[:-2])) == "You said: hello"


def test_two_requests_on_one_connection_and_n_answers_keep_apart(serve) -> None:
    server = serve(FakeLLM(answer=lambda request: request.id[-1] * 3, delay=0.001))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for _ in range(2):
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 3})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        said = ["", "", ""]
        for event in connection.getresponse().read().split(b"\n\n")[:-2]:
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            said[choice["index"]] += choice["delta"].get("content") or ""
        assert said == ["000", "111", "222"]
    connection.close()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed


def test_an_outlet_writes_chunks_while_it_is_open() -> None:
    transport = Transport()
    outlet = Outlet(transport)
    outlet.write("é".encode() * 10)
    assert transport.written == b"14\r\n" + "é".encode() * 10 + b"\r\n"
    assert outlet.open
    outlet.paused = True
    assert not outlet.open
    outlet.paused, transport.closed = False, True
    assert not outlet.open
    assert outlet_of({"type": "http", "http_version": "1.1"}) is None


def test_what_goes_straight_never_overtakes_what_waits() -> None:
    async def work() -> tuple[list[str], list[str]]:
        inbox, straight = Inbox(["a"]), list[str]()

        def take(event: Event) -> bool:
            if event.text == "3" or event.finish:
                return False
            straight.append(event.text)
            return True

        waiting = asyncio.create_task(inbox.take(take))
        await asyncio.sleep(0)
        for text in "12345":
            inbox.put(Event("a", text))
        inbox.put(Event("a", finish="stop"))
        return straight, [event.text for event in await waiting]

    straight, waited = asyncio.run(work())
    assert straight == ["1", "2"]
    assert waited == ["3", "4", "5", ""]


def test_what_waits_for_a_slow_client_takes_the_room_of_its_text() -> None:
    async def work() -> list[Event]:
        inbox = Inbox(["a", "b"])
        for number in range(20_000):
            inbox.put(Event("a" if number % 1000 else "b", f" {number}"))
            assert len(inbox._events) < 1000
        return await inbox.take()

    events = asyncio.run(work())
    for ident, numbers in (("b", range(0, 20_000, 1000)), ("a", [n for n in range(20_000) if n % 1000])):
        text = "".join(event.text for event in events if event.id == ident)
        assert text == "".join(f" {number}" for number in numbers)
