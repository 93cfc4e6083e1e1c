"""A client that reads many streamed answers at once and costs little: raw sockets, no JSON but for the first text.

It runs in processes of its own beside the server, on the same cores where there are no others: what it costs is told.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

_READ = 1 << 18
_TAIL = 4096  # bytes at the end of an answer in which its counts stand
_FRAME = b"data: "
_DONE = b"[DONE]"
_TEXTS = ("text", "content", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go; `head` is all of a request but the length of its body."""

    address: tuple[str, int]
    head: bytes

    def request(self, body: bytes) -> bytes:
        return self.head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass(slots=True)
class Heard:
    """One answer. Seconds are the monotonic clock's; `arrivals` are those of pieces with at least one chunk."""

    sent: float
    first: float | None = None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    chunks: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None


class Answer:
    """The bytes of one response on their way: its head, then the chunks of HTTP, then events."""

    def __init__(self, sent: float) -> None:
        self.heard = Heard(sent)
        self.done = False
        self._raw = b""
        self._text = b""  # events until the first that says something, then the end of what was read
        self._in_body = False

    def feed(self, data: bytes, now: float) -> None:
        self._raw += data
        if not self._in_body and not self._read_head():
            return
        if text := self._unchunked():
            self.heard.chunks += text.count(b"\n\n")
            self.heard.arrivals.append(now)
            self._text += text
            if self.heard.first is None and any(map(_has_text, self._text.split(b"\n\n"))):
                self.heard.first = now
            if self.heard.first is not None:
                self._text = self._text[-_TAIL:]
        if self.done:
            self._count()

    def _read_head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        if head.split(b" ", 2)[1] != b"200" or b"text/event-stream" not in head.lower():
            return self._refused(head, rest)
        self._in_body, self._raw = True, rest
        return True

    def _refused(self, head: bytes, rest: bytes) -> bool:
        """An answer that is no stream is read to its end, for what it says."""
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(rest) >= length:
            status = head.split(b"\r\n", 1)[0].decode("latin-1")
            self.heard.error = f"{status}: {rest[:300].decode('utf-8', 'replace')}"
            self.done = True
        return False

    def _unchunked(self) -> bytes:
        raw, parts, at = self._raw, list[bytes](), 0
        while (line := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if len(raw) < end + 2:
                break
            if not size:
                self.done = True
                break
            parts.append(raw[line + 2 : end])
            at = end + 2
        self._raw = raw[at:]
        return b"".join(parts)

    def _count(self) -> None:
        """The stream is over: its last events say how many tokens it had."""
        counts, error = _last_counts(self._text)
        self.heard.chunks -= _DONE in self._text
        if counts is not None:
            self.heard.prompt_tokens, self.heard.tokens = counts["prompt_tokens"], counts["completion_tokens"]
        else:
            self.heard.error = error or "the stream ended without its counts (stream_options.include_usage)"


def _has_text(event: bytes) -> bool:
    chunk = _json(event)
    for choice in chunk.get("choices") or ():
        said = choice.get("delta") or choice
        if any(said.get(name) for name in _TEXTS):
            return True
    return False


def _last_counts(text: bytes) -> tuple[dict[str, int] | None, str | None]:
    """The usage at the end of a stream, or the error that ended it."""
    for event in reversed(text.split(b"\n\n")):
        chunk = _json(event)
        if "error" in chunk:
            return None, str(chunk["error"])
        if chunk.get("usage"):
            return chunk["usage"], None
    return None, None


def _json(event: bytes) -> dict[str, Any]:
    try:
        found = json.loads(event[event.rindex(_FRAME) + len(_FRAME) :])
    except ValueError:  # [DONE], or what is left of an event whose beginning was dropped
        return {}
    return found if isinstance(found, dict) else {}


class Streams:
    """`count` connections; each sends the next body when its answer is there, until none is left."""

    def __init__(self, target: Target, bodies: Sequence[bytes], count: int) -> None:
        self._target, self._bodies = target, deque(bodies)
        self._selector = selectors.DefaultSelector()
        self._count = min(count, len(bodies))
        self._sockets = [socket.create_connection(target.address, timeout=60) for _ in range(self._count)]
        self.heard: list[Heard] = []

    def run(self) -> list[Heard]:
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ, self._ask(sock))
        while self._selector.get_map():
            for key, _ in self._selector.select():
                self._read(key)
        self._selector.close()
        return self.heard

    def _ask(self, sock: socket.socket) -> Answer:
        sent = time.monotonic()
        sock.sendall(self._target.request(self._bodies.popleft()))
        return Answer(sent)

    def _read(self, key: selectors.SelectorKey) -> None:
        sock, answer = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(_READ)
            if data:
                answer.feed(data, time.monotonic())
            else:
                answer.heard.error = "the connection was closed in the middle of an answer"
        except (OSError, ValueError) as error:
            answer.heard.error = f"{type(error).__name__}: {error}"
        if answer.done or answer.heard.error:
            self._next(sock, answer)

    def _next(self, sock: socket.socket, answer: Answer) -> None:
        self.heard.append(answer.heard)
        self._selector.unregister(sock)
        if not answer.done:  # not fit for a further request
            sock.close()
            if self._bodies:
                sock = socket.create_connection(self._target.address, timeout=60)
        if self._bodies:
            self._selector.register(sock, selectors.EVENT_READ, self._ask(sock))
        else:
            sock.close()


def client(pipe: Connection, target: Target, bodies: Sequence[bytes], count: int) -> None:
    """A process: says when it is connected, waits for the word, and sends what it heard and the CPU seconds it took."""
    try:
        streams = Streams(target, bodies, count)
        pipe.send(None)
        pipe.recv()
        begun = time.process_time()
        pipe.send((streams.run(), time.process_time() - begun))
    except (OSError, EOFError) as error:
        pipe.send(str(error))
