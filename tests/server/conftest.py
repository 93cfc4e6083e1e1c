"""A server in a thread of its own, with a fake model, on a free port; and the official client for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI

from fakes import FakeLLM
from minicpm_cli.server.address import address_of, bind
from minicpm_cli.server.app import Service
from minicpm_cli.server.served import Limits
from minicpm_cli.server.serving import Serving

JSON = {"Content-Type": "application/json"}


@dataclass
class Running:
    """A server that listens."""

    llm: Any
    service: Service
    serving: Serving
    url: str
    thread: threading.Thread
    said: list[str] = field(default_factory=list)
    clients: list[OpenAI] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, key: str = "unused") -> OpenAI:
        self.clients.append(OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20))
        return self.clients[-1]

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        """`body` as JSON, or as it is if it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, JSON if headers is None else headers)
            response = connection.getresponse()
            return Answered(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        return self.call("POST", path, body, headers)

    def chat(self, text: str = "hello", **more: Any) -> Answered:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.serving.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's shape, whole."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(llm=FakeLLM(), names=..., api_key=..., **limits) -> Running."""
    yield from _servers()


@pytest.fixture(scope="module")
def serve_once() -> Iterator[Serve]:
    """The same, for all tests of a module."""
    yield from _servers()


def _servers() -> Iterator[Serve]:
    running: list[Running] = []

    def started(llm: Any = None, names: Any = ("fake",), api_key: str | None = None, **limits: Any) -> Running:
        llm = llm or FakeLLM()
        said: list[str] = []
        service = Service(llm, names, llm.defaults, Limits(**limits), api_key)
        serving = Serving(service, said.append)
        sock = bind("127.0.0.1", 0)
        thread = threading.Thread(target=_go, args=(serving, sock), daemon=True)
        running.append(Running(llm, service, serving, address_of(sock), thread, said))
        thread.start()
        until(lambda: serving.started)
        return running[-1]

    yield started
    for server in running:
        server.stop()


def _go(serving: Serving, sock: Any) -> None:
    try:
        serving.go(sock)
    except Exception as error:  # noqa: BLE001 - looked at by the tests
        serving.error = error  # type: ignore[attr-defined]
    finally:
        sock.close()
