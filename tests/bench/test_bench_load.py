"""What clients measure of a server: a real one with a fake model, and answers that come in any pieces."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fakes import FakeLLM
from minicpm_cli.bench import load
from minicpm_cli.bench.load import LoadOptions, measure_load
from minicpm_cli.bench.streams import Answer, Streams, Target
from minicpm_cli.errors import MinicpmError, RequestError, UsageError
from minicpm_cli.llm.wire import Wire
from minicpm_cli.server.address import address_of, bind
from minicpm_cli.server.app import Service
from minicpm_cli.server.serving import Serving
from minicpm_cli.types import Request

EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "é\n\n"}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": " b"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def response(*events: Any) -> bytes:
    frames = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return HEAD + chunked(*frames, b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_an_answer_is_read_from_pieces_of_any_size(size: int) -> None:
    raw, answer = response(*EVENTS), Answer(0.0)
    for at in range(0, len(raw), size):
        assert not answer.done
        answer.feed(raw[at : at + size], float(at))
    heard = answer.heard
    assert answer.done
    assert heard.error is None
    assert (heard.prompt_tokens, heard.tokens, heard.chunks) == (7, 2, 5)
    assert heard.first is not None
    first = raw.index(b"\\u00e9")
    assert size > 100 or first < heard.first + size <= first + size + 100
    assert list(heard.arrivals) == sorted(heard.arrivals)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (response(*EVENTS[:-1]), "without its counts"),
        (response(*EVENTS[:2], {"error": {"message": "out of memory"}}), "out of memory"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy", "429 Too Many: busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", "200 OK: {}"),
    ],
)
def test_an_answer_that_is_none_is_told(raw: bytes, error: str) -> None:
    answer = Answer(0.0)
    answer.feed(raw, 1.0)
    assert answer.done
    assert error in str(answer.heard.error)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 64 tokens, 8 drawn for each, two streams of a process."""
    monkeypatch.setattr(
        load,
        "_WORK",
        load.WORKLOADS["throughput"].__class__(
            "small", 1, 64, 8, load._WORK.rate, "tok/s", "small", temperature=0.8, top_p=0.8
        ),
    )
    monkeypatch.setattr(load, "_PER_PROCESS", 2)


@pytest.fixture
def served() -> Iterator[Any]:
    """served(llm) -> address, of a server in a thread."""
    started = []

    def start(llm: FakeLLM) -> str:
        sock = bind("127.0.0.1", 0)
        serving = Serving(Service(llm, ["fake"], llm.defaults, api_key="sesame"), lambda text: None)
        thread = threading.Thread(target=serving.go, args=(sock,), daemon=True)
        thread.start()
        started.append((serving, thread, sock))
        while not serving.started:
            time.sleep(0.005)
        return address_of(sock)

    yield start
    for serving, thread, sock in started:
        serving.should_exit = True
        thread.join(20)
        sock.close()


@pytest.mark.usefixtures("small")
def test_a_server_is_measured(served) -> None:
    # Slow enough that no two tokens are ready at once, which would go out as one chunk.
    llm = FakeLLM(answer=lambda request: "word " * 100, delay=0.01, seats=8)
    url, said = served(llm), list[str]()
    found = measure_load(LoadOptions(url, 3, 7, "sesame").checked(), said.append)
    assert said == ["7 requests of 64 tokens, 8 drawn for each, by 3 streams"]
    assert (found.model, found.streams, found.requests, found.failed) == ("fake", 3, 7, 0)
    assert found.tokens == 7 * 8
    assert found.prompt_tokens == 7 * 64
    assert found.chunks == 7 * 11  # who speaks, the tokens, the end, the counts
    assert found.rate == pytest.approx(found.tokens / found.seconds)
    assert 0.005 < found.token["mean"] * 8 < 1
    assert found.first["p50"] <= found.first["p90"] <= found.first["max"] < found.seconds
    assert len(found.client_cpu) in (1, 2)
    text = "\n".join(found.lines())
    assert "3 streams" in text
    assert "first token" in text
    assert json.loads(found.to_json())["tokens"] == 56


@pytest.mark.usefixtures("small")
def test_requests_that_fail_are_counted_and_told(served) -> None:
    numbers = iter(range(100))
    bad = RequestError("bad_parameter", "not this one")
    llm = FakeLLM(answer=lambda request: "word " * 9, fail=lambda request: bad if next(numbers) == 4 else None)
    found = measure_load(LoadOptions(served(llm), 2, 6, "sesame").checked(), lambda text: None)
    assert (found.requests, found.failed, found.tokens) == (6, 1, 5 * 8)
    assert "not this one" in "\n".join(found.lines())


@pytest.mark.usefixtures("small")
def test_answers_end_early_only_where_a_server_will_not_go_on(served) -> None:
    def opinion(request: Request) -> RequestError | None:
        return RequestError("bad_parameter", "unknown field ignore_eos") if request.params.ignore_eos else None

    for fail, said, asked in ((None, "8 drawn for each", True), (opinion, "up to 8 (the server takes no", False)):
        llm, notes = FakeLLM(answer=lambda request: "word " * 9, fail=fail or (lambda request: None)), list[str]()
        found = measure_load(LoadOptions(served(llm), 1, 2, "sesame").checked(), notes.append)
        assert (found.failed, found.tokens) == (0, 2 * 8)
        assert said in notes[0]
        assert [request.params.ignore_eos for request in llm.seen[-2:]] == [asked] * 2


def test_a_connection_that_breaks_is_replaced(served) -> None:
    target = Target(*Wire(served(FakeLLM()), "wrong").raw_post("/v1/chat/completions"))
    heard = Streams(target, [b"{}"] * 3, 2).run()
    assert [str(one.error)[:12] for one in heard] == ["HTTP/1.1 401"] * 3


def test_what_cannot_be_measured_is_refused(served) -> None:
    for options in (LoadOptions("x", 0), LoadOptions("x", 5000), LoadOptions("x", 1, 0)):
        with pytest.raises(UsageError):
            options.checked()
    with pytest.raises(UsageError, match="plain http"):
        Wire("https://somewhere", None).raw_post("/x")
    with pytest.raises(MinicpmError, match="no server answers"):
        measure_load(LoadOptions("127.0.0.1:9"), lambda text: None)
    with pytest.raises(MinicpmError, match="Incorrect API key"):
        measure_load(LoadOptions(served(FakeLLM())), lambda text: None)


def test_the_address_of_a_request() -> None:
    address, head = Wire("127.0.0.1:8000/v1/", "key").raw_post("/v1/chat/completions")
    assert address == ("127.0.0.1", 8000)
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert b"Authorization: Bearer key\r\n" in head
    assert Wire("[::1]:81", None).raw_post("/x")[0] == ("::1", 81)
    assert Wire("http://host/prefix", None).raw_post("/x")[0] == ("host", 80)
    with closing(bind("127.0.0.1", 0)) as sock:
        assert address_of(sock).startswith("http://127.0.0.1:")
