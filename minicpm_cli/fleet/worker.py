"""A worker: one engine in a process of its own, asked through a connection.

It ends when the other side is gone. A Ctrl-C is the other side's business.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from socket import gethostname
from typing import Protocol

from minicpm_cli.errors import MinicpmError, ModelNotFound
from minicpm_cli.fleet.messages import Alive, Ask, Begun, Failed, Finished, FromWorker, Order, Ready, Recall, Returned
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.types import Event, Request

BEAT = 10.0  # seconds


class Model(LanguageModel, Protocol):
    """What a worker needs of an LLM."""

    @property
    def steps(self) -> int:
        """That its engine has taken. From any thread."""

    def cancel(self, request_id: str) -> None:
        """Its last event, before the next step, says "cancelled"; nothing where it is not running. From any thread."""


class Outbox:
    """For several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._turn = connection, threading.Lock()

    def send(self, message: FromWorker) -> None:
        with self._turn:
            self._connection.send(message)


class Inbox:
    """Reads all that comes at once: what waits here is the worker's, and the sender is free."""

    def __init__(self, connection: Connection, model: Model, outbox: Outbox) -> None:
        self._connection, self._model, self._outbox = connection, model, outbox
        self._asked: deque[Ask] = deque()
        self._changed = threading.Condition()
        self.stopped = self.ended = False
        threading.Thread(target=self._read, name="fleet-inbox", daemon=True).start()

    def begin(self) -> None:
        """What was stopped is behind us."""
        with self._changed:
            self.stopped = False

    def wait(self) -> bool:
        """Until there is something to do; False: the other side is gone."""
        with self._changed:
            while not (self._asked or self.ended):
                self._changed.wait()
            return not self.ended

    def take(self) -> Ask | None:
        with self._changed:
            return self._asked.popleft() if self._asked and not self.stopped else None

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except Exception:  # noqa: BLE001 - whatever cannot be read is the end, as when the other side is gone
                message = None
            with self._changed:
                if isinstance(message, Ask):
                    self._asked.append(message)
                elif isinstance(message, Recall):
                    self._give_back(message)
                else:
                    self._asked.clear()
                    self.stopped, self.ended = True, self.ended or message is None
                self._changed.notify_all()
            if message is None:
                return

    def _give_back(self, recall: Recall) -> None:
        """At once what still waits here; what the model has got is told when it has let go of it."""
        waiting = {ask.request.id: ask for ask in self._asked if ask.epoch == recall.epoch}
        for ident in recall.ids:
            if ident not in waiting:
                self._model.cancel(ident)
                continue
            self._asked.remove(waiting[ident])
            with suppress(OSError):  # the other side is gone, which is heard next
                self._outbox.send(Returned(recall.epoch, ident))


def serve(llm: Model, connection: Connection, outbox: Outbox) -> None:
    """Until the other side is gone."""
    inbox = Inbox(connection, llm, outbox)
    outbox.send(Ready(llm.info))
    with _beating(llm, outbox):
        while inbox.wait():
            inbox.begin()
            asked = Asked(inbox)
            with closing(llm.stream(asked.requests())) as events:
                for event in events:
                    if inbox.stopped:
                        break
                    for message in asked.messages(llm, event):
                        outbox.send(message)


@contextmanager
def _beating(llm: Model, outbox: Outbox) -> Iterator[None]:
    """The other side hears from time to time that there were steps: a long prompt, or a long answer, tells nothing."""
    ended = threading.Event()

    def beat() -> None:
        seen = 0
        with suppress(OSError):  # the other side is gone, which is heard elsewhere
            while not ended.wait(BEAT):
                if (steps := llm.steps) != seen:
                    seen = steps
                    outbox.send(Alive())

    thread = threading.Thread(target=beat, name="fleet-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Asked:
    """The requests of one stream, and what became of them."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._open: dict[str, tuple[int, list[Event]]] = {}  # epoch, events so far

    def requests(self) -> Iterator[Request | None]:
        while not self._inbox.stopped:
            ask = self._inbox.take()
            if ask is None and not self._open:
                return  # the worker waits; an engine would look again every millisecond
            if ask is not None:
                self._open[ask.request.id] = ask.epoch, []
            yield None if ask is None else ask.request

    def messages(self, llm: Model, event: Event) -> Iterator[FromWorker]:
        epoch, before = self._open[event.id]
        if event.finish == "cancelled":  # as nobody but the fleet does
            del self._open[event.id]
            yield Returned(epoch, event.id)
            return
        if not before:
            yield Begun(epoch, event.id)
        add(before, event)
        if event.finish is not None:
            del self._open[event.id]
            yield Finished(epoch, event.id, tuple(before), llm.totals, llm.gpu_peak_bytes)


def add(events: list[Event], event: Event) -> None:
    """Joins pieces of one text."""
    last = events[-1] if events else None
    if last is None or event.finish or event.tool_call or last.tool_call or last.channel != event.channel:
        events.append(sendable(event))
    else:
        events[-1] = replace(last, text=last.text + event.text, logprobs=last.logprobs + event.logprobs)


def sendable(event: Event) -> Event:
    """Not every library's error can be."""
    if event.error is None or isinstance(event.error, MinicpmError):
        return event
    try:
        pickle.loads(pickle.dumps(event.error))
    except Exception:  # noqa: BLE001 - whatever it is that its class does
        return replace(event, error=MinicpmError(f"{type(event.error).__name__}: {event.error}"))
    return event


def work(connection: Connection) -> None:
    """A worker's whole life. The first thing it is told is its order."""
    outbox = Outbox(connection)
    try:
        order: Order = connection.recv()
        if not order.files.path.exists():
            raise ModelNotFound(
                f"{order.files.path} is not on {gethostname()}: keep models on a file system that all nodes share."
            )
        from minicpm_cli.llm.llm import LLM

        llm = LLM.open(order.options, order.files, threads=order.threads, cache=order.cache)
        with closing(llm):
            serve(llm, connection, outbox)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # noqa: BLE001 - told to whoever can say it
        with suppress(OSError):
            outbox.send(Failed(error if isinstance(error, MinicpmError) else MinicpmError(repr(error))))


def main(number: int) -> None:
    """The process of a `ProcessLink`, whose connection has this file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(Connection(number))
