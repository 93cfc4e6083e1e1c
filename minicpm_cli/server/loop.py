"""One engine for all clients: its loop has a thread of its own, requests go in and events come out between steps."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from math import ceil

from minicpm_cli.errors import MinicpmError, RequestError
from minicpm_cli.server.inbox import Inbox
from minicpm_cli.server.served import Served
from minicpm_cli.types import Event, Request

_FAILURES = 3  # of the loop itself, with no request finished between them, before the server gives up
_RATE_WINDOW = 64  # requests that finished, by which a waiting time is guessed
_LONGEST_WAIT = 60  # seconds that a client is told to wait at the most


class Busy(MinicpmError):
    """The queue is full. `seconds` is when to try again."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting already. Try again in {seconds} s.")
        self.seconds = seconds


class EngineLoop:
    """`heard` is told each event of a known request, with its inbox, in the thread of the event loop.

    `submit`, `cancel` and `stop` belong to that thread, too.
    """

    def __init__(
        self, llm: Served, max_queue: int, heard: Callable[[Event, Inbox], None] = lambda event, inbox: None
    ) -> None:
        self._llm, self._heard, self.max_queue = llm, heard, max_queue
        self._pending: deque[Request] = deque()
        self._running: set[str] = set()  # pulled by the engine, not finished
        self._changed = threading.Condition()
        self._closed = self.dead = False
        self._failures = 0
        self._inboxes: dict[str, Inbox] = {}
        self._outbox: deque[Event] = deque()
        self._told = False  # the event loop will look into the outbox
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._thread.start()

    def stop(self) -> None:
        """Cuts what still runs off, and waits for the thread."""
        for ident in list(self._inboxes):
            self._cancel(ident)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._pending)

    @property
    def unfinished(self) -> int:
        return len(self._inboxes)

    def check_room(self, count: int = 1) -> None:
        """Raises Busy for a full queue, RequestError for more than ever fits."""
        if count > self.max_queue:
            raise RequestError(
                "bad_parameter", f"the call asks for {count} answers; at most {self.max_queue} may wait in the queue"
            )
        if len(self._pending) + count > self.max_queue:
            raise Busy(len(self._pending), self._wait_seconds())

    def submit(self, requests: Sequence[Request]) -> Inbox:
        """Puts requests, whose ids nobody else has, in line. Raises as `check_room`."""
        self.check_room(len(requests))
        inbox = Inbox([request.id for request in requests])
        self._inboxes.update((request.id, inbox) for request in requests)
        with self._changed:
            self._pending.extend(requests)
            self._changed.notify_all()
        return inbox

    def cancel(self, inbox: Inbox) -> None:
        """Nobody reads this any more: what is not finished is dropped, its pages before the next step."""
        for ident in tuple(inbox.open):
            self._cancel(ident)
            if self._inboxes.pop(ident, None) is not None:
                self._heard(Event(ident, finish="cancelled"), inbox)

    def _cancel(self, ident: str) -> None:
        with self._changed:
            waiting = next((request for request in self._pending if request.id == ident), None)
            if waiting is not None:
                self._pending.remove(waiting)
        if waiting is None:
            self._llm.cancel(ident)
        else:
            self._tell(Event(ident, finish="cancelled"))

    def _wait_seconds(self) -> int:
        """How long the queue takes at the pace of the last requests."""
        if len(self._ends) < 2 or (span := self._ends[-1] - self._ends[0]) <= 0:
            return 1
        return min(_LONGEST_WAIT, max(1, ceil(len(self._pending) * span / (len(self._ends) - 1))))

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed and not self.dead:
            try:
                with closing(self._llm.stream(self._requests())) as events:
                    for event in events:
                        self._take(event)
            except Exception as error:  # noqa: BLE001 - a defect of one step must not end the server
                self._failed(error)

    def _requests(self) -> Iterator[Request | None]:
        """The engine's source: waits while nothing runs, and has None for it while something does."""
        while True:
            with self._changed:
                while not (self._pending or self._running or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                request = self._pending.popleft() if self._pending else None
                if request is not None:
                    self._running.add(request.id)
            yield request

    def _take(self, event: Event) -> None:
        if event.finish is not None:
            with self._changed:
                self._running.discard(event.id)
            self._failures = 0
        self._tell(event)

    def _failed(self, error: Exception) -> None:
        """Every request in the engine ends with what ended the loop; the next ones find a fresh loop."""
        traceback.print_exception(error, file=sys.stderr)
        self._failures += 1
        with self._changed:
            lost, self._running = self._running, set()
            if self._failures >= _FAILURES:
                self.dead = True
                lost |= {request.id for request in self._pending}
                self._pending.clear()
        for ident in lost:
            self._tell(Event(ident, finish="error", error=error))

    # ---- between the threads --------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """The event loop is woken once for all events of a step: each waking costs it a system call."""
        self._outbox.append(event)
        if not self._told and self._events is not None and not self._events.is_closed():
            self._told = True
            self._events.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False
        while self._outbox:
            event = self._outbox.popleft()
            inbox = self._inboxes.get(event.id)
            if inbox is None:
                continue
            if event.finish is not None:
                del self._inboxes[event.id]
                self._ends.append(time.monotonic())
            self._heard(event, inbox)
            inbox.put(event)
