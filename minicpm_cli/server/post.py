"""What the process of the engine and the one of HTTP write each other: all that a step brings in one piece."""

from __future__ import annotations

import marshal
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from minicpm_cli.llm.info import Occupancy, Totals
from minicpm_cli.types import Event, Request

# ---- from HTTP to the engine --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Put:
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Wait until nothing runs, and say so with `Ended`."""


@dataclass(frozen=True, slots=True)
class Say:
    """Something for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The server has ended; `cut`: before its requests had. `error` is why, where it had to."""

    cut: bool = False
    error: str | None = None


# ---- from the engine to HTTP, beside events -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """The model has pulled this request."""

    id: str


@dataclass(frozen=True, slots=True)
class Counts:
    totals: Totals
    occupancy: Occupancy
    gpu_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Signal:
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """No event follows."""

    dead: bool = False


# ---- the way ------------------------------------------------------------------------------------------------------


class Post:
    """Sends from a thread of its own, in order: nobody who has something to say waits for the other side to read.

    `put` may be called from anywhere, a signal handler among them. What gathers while the thread has no turn goes as
    one message.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.put = self._queue.put
        self._thread = threading.Thread(target=self._work, name="post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When everything is sent."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        queue, open_ = self._queue, True
        with suppress(OSError):  # whom to tell is gone, which the reader finds too
            while open_:
                items = [queue.get()]
                while not queue.empty():
                    items.append(queue.get())
                if None in items:
                    items, open_ = items[: items.index(None)], False
                self._pipe.send_bytes(packed(items))


def received(pipe: Connection) -> Iterator[Any]:
    """One message. Raises EOFError or OSError when the other side is gone."""
    return unpacked(pipe.recv_bytes())


def packed(items: Sequence[Any]) -> bytes:
    """Events of plain text, of which each step has hundreds, as three strings; whatever else there is, pickled."""
    return marshal.dumps([_small(item) if type(item) is Event else pickle.dumps(item) for item in items], 2)


def unpacked(message: bytes) -> Iterator[Any]:
    for part in marshal.loads(message):
        yield Event(*part) if type(part) is tuple else pickle.loads(part)


def _small(event: Event) -> tuple[str, str, str] | bytes:
    if event.finish is None and not event.logprobs and event.tool_call is None:
        return (event.id, event.text, event.channel)
    return pickle.dumps(event)
