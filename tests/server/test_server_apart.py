"""A server in two processes: what its clients see, and what becomes of one process when the other goes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from checkpoints import write_checkpoint
from fakes import FakeLLM
from minicpm_cli.errors import MinicpmError, RequestError
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.server.address import address_of, bind
from minicpm_cli.server.apart import Front, Setup
from minicpm_cli.server.served import Limits
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Request

CHAT, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
FAKE_CLI = Path(__file__).parents[1] / "fake_cli.py"


def until(true: Callable[[], object], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@dataclass
class Apart:
    """A server whose HTTP is in another process; its model is here."""

    llm: Any
    front: Front
    url: str
    thread: threading.Thread
    said: list[str] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)  # whether requests were cut off, or the error

    @property
    def process(self) -> psutil.Process:
        pid = self.front._process.pid
        assert pid is not None
        return psutil.Process(pid)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=20)

    def sent(self, method: str = "POST", path: str = CHAT, **body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", int(self.url.rsplit(":", 1)[1]), timeout=20)
        connection.request(method, path, json.dumps(body) if body else None, JSON)
        return connection

    def chat(self, text: str = "hello", **more: Any) -> tuple[int, Any, http.client.HTTPMessage]:
        connection = self.sent(messages=[{"role": "user", "content": text}], **more)
        response = connection.getresponse()
        body = json.loads(response.read())
        connection.close()
        return response.status, body, response.headers

    def number(self, name: str) -> float:
        connection = self.sent("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == name), 0.0)


def _begun(llm: Any, open_texts: Any, limits: Limits) -> Apart:
    sock = bind("127.0.0.1", 0)
    front = Front(sock)
    said: list[str] = []
    ended: list[Any] = []

    def work() -> None:
        setup = Setup(open_texts, llm.info, ("fake",), llm.defaults, limits)
        try:
            ended.append(front.serve(llm, setup, said.append))
        except MinicpmError as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    server = Apart(llm, front, address_of(sock), thread, said, ended)
    thread.start()
    until(lambda: said or ended)
    sock.close()
    return server


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., Apart]]:
    servers: list[Apart] = []

    def begun(llm: Any, open_texts: Any = FakeLLM, **limits: Any) -> Apart:
        servers.append(_begun(llm, open_texts, Limits(**limits)))
        return servers[-1]

    yield begun
    for server in servers:
        server.front.__exit__(None, None, None)
        server.thread.join(10)
        assert not server.thread.is_alive()


@dataclass
class Asked(FakeLLM):
    """It refuses what is called bad, and thinks when it is asked to."""

    thought: Callable[[Request], str] = lambda request: "hm hm" if "think" in str(request.messages) else ""
    fail: Callable[[Request], MinicpmError | None] = lambda request: (
        RequestError("bad_parameter", "that was bad") if "bad" in str(request.messages) else None
    )


@pytest.fixture(scope="module")
def server(apart) -> Apart:
    """One for the tests that leave it as it was: two seats, and room for two more."""
    return apart(Asked(seats=2, delay=0.002), max_queue=2)


def slow(words: int = 1000, **more: Any) -> FakeLLM:
    return FakeLLM(delay=0.003, answer=lambda request: "word " * words, **more)


# ---- what clients see ---------------------------------------------------------------------------------------------


def test_answers_whole_and_streamed_are_those_of_the_model(server: Apart) -> None:
    with server.client() as client:
        asked: Any = [{"role": "user", "content": "think of déjà vu, 你好 👍🏽"}]
        whole = client.chat.completions.create(model="fake", messages=asked)
        assert whole.choices[0].message.content == "You said: think of déjà vu, 你好 👍🏽"
        chunks = list(
            client.chat.completions.create(
                model="fake", messages=asked, stream=True, stream_options={"include_usage": True}
            )
        )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm hm"
    assert len([delta for delta in deltas if delta.content]) == 8  # a chunk a token
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


def test_many_streams_at_once_lose_and_mix_nothing(apart) -> None:
    server = apart(FakeLLM(delay=0.0002, seats=16, answer=lambda r: r.messages[-1].content + " end " * 50))

    def asked(number: int) -> str:
        with server.client() as client:
            messages: Any = [{"role": "user", "content": f"number {number}"}]
            chunks = client.chat.completions.create(model="fake", messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(asked, range(32))) == [f"number {number}" + " end " * 50 for number in range(32)]
    until(lambda: server.number('minicpm_requests_finished_total{reason="stop"}') == 32)
    until(lambda: server.number("minicpm_generated_tokens_total") == server.llm.totals.generated_tokens)
    assert server.number("minicpm_requests_running") == 0


def test_what_the_engine_refuses_has_its_own_status(server: Apart) -> None:
    for stream in (False, True):
        status, body, _ = server.chat("bad", stream=stream)
        assert (status, body["error"]["message"]) == (400, "that was bad")
    assert server.chat()[0] == 200


def test_one_that_goes_away_is_cancelled_and_a_full_queue_says_when_to_come_again(apart) -> None:
    server = apart(slow(seats=1), max_queue=2)
    hello = [{"role": "user", "content": "hello"}]
    held = [server.sent(messages=hello, stream=True)]
    until(lambda: server.llm.running == 1)
    held += [server.sent(messages=hello) for _ in range(2)]
    until(lambda: server.number("minicpm_requests_waiting") == 2)
    status, body, headers = server.chat()
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    for connection in reversed(held):
        connection.close()
    until(lambda: not server.llm.running and server.llm.cancelled)
    assert server.chat(max_tokens=1)[0] == 200
    assert len(server.llm.seen) == 2  # those that waited never reached the model
    assert server.number('minicpm_requests_finished_total{reason="cancelled"}') == 3


def test_pages_of_one_that_goes_away_are_free_after_one_step(apart, tmp_path: Path, monkeypatch) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "minicpm4-0.5b")
    options = LoadOptions(device="cpu", dtype="fp32", ctx=4000, max_seqs=2)
    llm = LLM.open(options, ModelFiles("tiny", folder))
    server, engine = apart(llm, llm.open_texts), llm._engine
    connection = server.sent(messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=3800, top_k=1)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    aborted, abort = list[int](), engine.abort
    monkeypatch.setattr(engine, "abort", lambda ident: (aborted.append(engine.stats.steps), abort(ident)))
    response.close()
    connection.close()
    until(lambda: aborted and not engine.scheduler.live)
    assert engine.stats.steps - aborted[0] <= 1
    engine.scheduler.pool.check()
    assert not llm.occupancy.pages_held


# ---- the end ------------------------------------------------------------------------------------------------------


@dataclass
class Failing(FakeLLM):
    """Its loop fails as often as `failures` says."""

    failures: int = 1

    def stream(self, requests):
        for event in super().stream(requests):
            if self.failures:
                self.failures -= 1
                raise RuntimeError("a defect")
            yield event


def test_a_defect_in_the_loop_is_told_and_too_many_end_the_server(apart, capfd) -> None:
    server = apart(Failing())
    assert server.chat()[0] == 500
    assert server.chat()[1]["choices"][0]["message"]["content"] == "You said: hello"
    server.llm.failures = 99
    for _ in range(3):
        assert server.chat()[0] in (500, 503)
    server.thread.join(15)
    assert "engine failed several times" in str(server.ended[0])
    assert "RuntimeError: a defect" in capfd.readouterr().err


def test_the_engine_ends_with_an_error_when_the_other_process_is_killed(apart) -> None:
    server = apart(slow())
    connection = server.sent(messages=[{"role": "user", "content": "hello"}])
    until(lambda: server.llm.running == 1)
    server.process.kill()
    server.thread.join(15)
    assert "the process that speaks HTTP has ended" in str(server.ended[0])
    assert server.llm.cancelled
    connection.close()


class Broken(FakeLLM):
    """What this process asks it beside its answers fails."""

    @property
    def occupancy(self):
        raise RuntimeError("a defect elsewhere")


def test_a_defect_beside_the_engine_leaves_no_server_without_one() -> None:
    llm = Broken()
    setup = Setup(FakeLLM, llm.info, ("fake",), llm.defaults, Limits())
    with closing(bind("127.0.0.1", 0)) as sock, Front(sock) as front, pytest.raises(RuntimeError, match="elsewhere"):
        front.serve(llm, setup, lambda text: None)
    assert front._process.exitcode == 0


@pytest.fixture
def program() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """The whole command line with a fake model, and where it listens."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, str(FAKE_CLI), "0.01", "serve", "--port", "0", "--http-process", *arguments]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        assert started[-1].stderr is not None
        return started[-1], next(
            found[0] for line in started[-1].stderr if (found := re.search(r"http://[^/\s]+", line))
        )

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        if process.stderr:
            process.stderr.close()


def long(url: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    body = {"messages": [{"role": "user", "content": "circles"}], "stream": True}
    connection.request("POST", CHAT, json.dumps(body), JSON)
    return connection


def status(url: str) -> int:
    connection = long(url)
    with closing(connection), connection.getresponse() as response:
        return response.status


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_signal_drains_a_second_one_cuts_off_and_both_processes_are_gone(program) -> None:
    process, url = program()
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    connection = long(url)
    response = connection.getresponse()
    response.readline()
    for child in children:  # as a terminal or a service manager does: all processes get it
        child.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    until(lambda: status(url) == 503)
    process.send_signal(signal.SIGTERM)
    assert "The server is stopping" in response.read().decode()
    assert process.wait(20) == 130
    assert "requests that still ran were cut off" in process.stderr.read()
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
    connection.close()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_nothing_is_left_of_a_server_whose_engine_is_killed(program) -> None:
    process, url = program()
    children = psutil.Process(process.pid).children(recursive=True)
    connection = long(url)
    response = connection.getresponse()
    response.readline()
    process.kill()
    assert "error" in response.read().decode()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    connection.close()


# ---- for long -----------------------------------------------------------------------------------------------------


def _drawn(request: Request) -> str:
    """Words that no other request has, as many as its number says."""
    number = int(str(request.messages[-1].content))
    return " ".join(f"{number}:{word}" for word in range(number % 97))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_of_all_lengths_for_a_minute_some_of_them_left_lose_and_mix_nothing(apart) -> None:
    server, end = apart(FakeLLM(answer=_drawn, seats=64, delay=0.00005)), time.monotonic() + 60

    def asked(number: int) -> int:
        connection = server.sent(messages=[{"role": "user", "content": str(number)}], stream=number % 5 > 0)
        with closing(connection), connection.getresponse() as response:
            if number % 7 == 0:
                response.readline()
                return 0
            raw = response.read()
        if number % 5:
            chunks = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            text = json.loads(raw)["choices"][0]["message"]["content"]
        assert text == " ".join(f"{number}:{word}" for word in range(number % 97))
        return 1

    def worker(place: int) -> int:
        done, number = 0, place
        while time.monotonic() < end:
            done, number = done + asked(number), number + 48
        return done

    with ThreadPoolExecutor(48) as pool:
        assert min(pool.map(worker, range(48))) >= 10
    until(lambda: not server.llm.running)
    until(lambda: server.number("minicpm_requests_running") == server.number("minicpm_requests_waiting") == 0)
