"""Clients that are slow, rude or gone at any moment, many at once: the others are served, and the counts add up."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from fakes import FakeLLM
from minicpm_cli.errors import MinicpmError, RequestError
from minicpm_cli.server.engine_thread import EngineThread
from minicpm_cli.server.faults import fault_of
from minicpm_cli.server.front import Distant
from minicpm_cli.server.post import Ended, Post, packed
from minicpm_cli.types import Event, Request

CHAT = "/v1/chat/completions"
ROUTES = (
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/health/../metrics"),
    ("GET", "/%68ealth/x"),
    ("PUT", "/v1/models"),
    ("HEAD", "/metrics"),
)


class Picky(FakeLLM):
    """It refuses what is called bad, and breaks down over what is called worse."""

    def __init__(self, **more: Any) -> None:
        super().__init__(fail=_refusal, **more)


def _refusal(request: Request) -> MinicpmError | None:
    return RequestError("bad_parameter", "that was bad") if "bad" in str(request.messages) else None


def body_of(text: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def request_of(body: bytes, *lines: str) -> bytes:
    head = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *lines, "", ""]).encode() + body


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        yield sock


def read_until(sock: socket.socket, *ends: bytes) -> bytes:
    """All that comes until it has each of these, or the other side hangs up."""
    read = b""
    with suppress(ConnectionError):
        while not all(end in read for end in ends) and (piece := sock.recv(65536)):
            read += piece
    return read


def metrics(server: Any) -> dict[str, float]:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.startswith(f"{name}{{"))


def quiet(server: Any, seconds: float = 10.0) -> dict[str, float]:
    """The counts when nothing runs any more."""
    end = time.monotonic() + seconds
    while (found := metrics(server))["minicpm_requests_running"] or found["minicpm_requests_waiting"]:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    assert server.service.engine.unfinished == 0
    return found


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_without_the_key_no_path_tells_anything_but_that(serve) -> None:
    server = serve(api_key="secret")
    for method, path in ROUTES:
        answered = server.call(method, path, b"{}" if method == "POST" else None)
        assert answered.status == 401, (method, path)
    assert server.call("GET", "/health").status == 200


def test_a_request_that_comes_byte_by_byte_is_one(serve) -> None:
    with connected(serve().port) as sock:
        for byte in request_of(body_of("slow")):
            sock.send(bytes([byte]))
        assert b"You said: slow" in read_until(sock, b"You said: slow")


def test_requests_in_one_piece_are_answered_in_turn(serve) -> None:
    with connected(serve().port) as sock:
        texts = ["one", "bad", "three"]
        sock.sendall(b"".join(request_of(body_of(text, stream=text == "one")) for text in texts))
        read = read_until(sock, b"[DONE]", b": bad", b": three")
    assert re.findall(rb"HTTP/1\.1 (\d+)", read) == [b"200"] * 3
    assert read.index(b"[DONE]") < read.index(b"You said: bad") < read.index(b"You said: three")


@pytest.mark.parametrize(
    "line",
    ["X: " + "y" * 200_000, "Content-Length: " + "9" * 5000, "Content-Length: -1", "Transfer-Encoding: nonsense", "\0"],
    ids=["long", "digits", "negative", "transfer", "nul"],
)
def test_a_head_that_is_none_is_refused_and_the_next_client_is_served(serve_once, line: str) -> None:
    server = serve_once()
    with connected(server.port) as sock:
        with suppress(ConnectionError):
            sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
        read = read_until(sock, b"\r\n\r\n")
    assert re.match(rb"(HTTP/1\.1 4\d\d |$)", read), read
    assert server.chat().status == 200


def test_clients_that_leave_at_any_byte_leave_nothing_behind(serve) -> None:
    server = serve(FakeLLM(delay=0.001))
    whole = request_of(body_of("going", stream=True))
    for cut in [*range(0, len(whole), 9), len(whole)]:
        with connected(server.port) as sock:
            sock.sendall(whole[:cut])
    for read in (1, 200, 500):
        with connected(server.port) as sock:
            sock.sendall(whole)
            sock.recv(read)
    with connected(server.port) as sock:  # neither reads nor goes
        sock.sendall(whole)
        assert server.chat().status == 200
    quiet(server)


def test_a_hundred_at_once_good_and_bad_are_each_told_what_is_theirs_and_counted(serve) -> None:
    server = serve(Picky(delay=0.0005), max_queue=200)
    rng = random.Random(5)
    kinds = [rng.choice(["good", "bad", "json", "field", "model", "gone", "stream", "path"]) for _ in range(100)]
    left = threading.Semaphore(0)

    def ask(number: int) -> tuple[str, int]:
        kind, text = kinds[number], f"number {number}"
        if kind == "gone":
            with connected(server.port) as sock:
                sock.sendall(request_of(body_of(text + " word" * 3000, stream=True)))
                sock.recv(10)
            left.release()
            return kind, 0
        given = {
            "bad": body_of("bad"),
            "json": b"{",
            "field": body_of(text, no_such=1),
            "model": body_of("", model="x"),
        }
        body = given.get(kind, body_of(text, stream=kind == "stream"))
        answered = server.post("/nowhere" if kind == "path" else CHAT, body)
        if kind in ("good", "stream"):
            said = answered.body.decode()
            words = "".join(re.findall(r'"content":"([^"]*)"', said))
            assert words == f"You said: {text}", said
        return kind, answered.status

    with ThreadPoolExecutor(100) as pool:
        found = Counter(pool.map(ask, range(100)))
    wanted = {"good": 200, "stream": 200, "bad": 400, "json": 400, "field": 400, "model": 404, "path": 404, "gone": 0}
    assert found == Counter((kind, wanted[kind]) for kind in kinds)
    counted, by_kind = quiet(server), Counter(kinds)
    ended = {re.sub(r".*reason=\"(\w+)\".*", r"\1", key): value for key, value in counted.items() if "reason=" in key}
    answered = by_kind["good"] + by_kind["stream"]
    assert ended == {"stop": answered, "error": by_kind["bad"], "cancelled": by_kind["gone"]}
    assert counted["minicpm_request_seconds_count"] == answered
    assert counted["minicpm_time_to_first_token_seconds_count"] == answered + by_kind["gone"]
    calls = {key: value for key, value in counted.items() if key.startswith("minicpm_http") and "/metrics" not in key}
    assert sum(calls.values()) == 100
    assert sum(value for key, value in calls.items() if '"other"' in key) == by_kind["path"]


def test_one_whose_body_comes_after_the_end_is_told_so(serve) -> None:
    """It was let in before the signal, and its tokens are there when the engine is not any more."""
    server, held = serve(), threading.Event()
    encode = server.service.llm.encoded

    def slowly(request: Request) -> Request:
        held.set()
        time.sleep(0.5)
        return encode(request)

    server.llm.encoded = slowly
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.chat)
        assert held.wait(10)
        server.serving.handle_exit(2, None)
        begun = time.monotonic()
        answered = asked.result()
    assert (answered.status, answered.error["code"]) == (503, "stopping")
    assert time.monotonic() - begun < 4, "it waited to be cut off"


def test_a_drain_under_load_finishes_what_it_took_and_refuses_the_rest(serve) -> None:
    server = serve(FakeLLM(delay=0.002, answer=lambda request: "word " * 40), max_queue=500)
    statuses, stop = Counter[int](), threading.Event()

    def ask(_: int) -> None:
        while not stop.is_set():
            try:
                answered = server.chat()
            except (OSError, http.client.HTTPException):  # it listens no more
                return
            if answered.status == 200:
                assert answered.json["choices"][0]["message"]["content"].count("word") == 40
            statuses[answered.status] += 1
            if answered.status == 503:
                return

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask, number) for number in range(16)]
        time.sleep(0.6)
        server.serving.handle_exit(15, None)
        for one in asking:
            one.result(30)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert not server.serving.cut
    assert statuses[200] >= 16
    assert set(statuses) <= {200, 503}


def test_a_client_that_writes_no_more_but_reads_is_gone_and_costs_nothing(serve) -> None:
    """As for every server of this kind: who shuts its side cannot be told from who left."""
    server = serve(FakeLLM(delay=0.01, answer=lambda request: "word " * 500))
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as sock:
        sock.sendall(request_of(body_of("x")))
        sock.shutdown(socket.SHUT_WR)
        quiet(server, 4.0)


@pytest.mark.parametrize("dead", [False, True])
def test_what_is_put_to_an_engine_that_has_ended_in_its_process_is_told_at_once(dead: bool) -> None:
    ours, theirs = Pipe()
    distant, told = Distant(FakeLLM().info, FakeLLM(), ours, Post(ours)), list[Event]()
    distant.start(told.append)
    distant.put([Request("early", "x")])
    if dead:
        theirs.close()
    else:
        theirs.send_bytes(packed([Event("early", finish="stop"), Ended()]))
    assert distant._over.wait(10)
    distant.put([Request("late", "x")])
    until(lambda: len(told) == 2)
    found = {event.id: event.finish for event in told}
    assert found == ({"early": "error", "late": "error"} if dead else {"early": "stop", "late": "cancelled"})
    assert distant.waiting == 0
    theirs.close()


class Broken(FakeLLM):
    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        for _ in requests:
            raise RuntimeError("a defect")
        yield from ()


@pytest.mark.parametrize("dead", [False, True])
def test_what_is_put_to_an_engine_that_has_ended_is_told_at_once(dead: bool, capsys) -> None:
    engine, told = EngineThread(Broken()), list[Event]()
    engine.start(told.append)
    for number in range(3 if dead else 0):
        engine.put([Request(f"early {number}", "x")])
        until(lambda number=number: len(told) > number)
    engine._thread.join(10) if dead else engine.stop()
    told.clear()
    engine.put([Request("late", "x")])
    assert [(event.id, event.finish) for event in told] == [("late", "error" if dead else "cancelled")]
    assert fault_of(told[0].error).code == ("failed" if dead else "internal_error")
    assert engine.waiting == 0
    assert capsys.readouterr().err.count("RuntimeError: a defect") == (3 if dead else 0)
