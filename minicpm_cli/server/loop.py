"""One engine for all clients: requests go in and events come out, in the thread of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

from minicpm_cli.errors import MinicpmError, RequestError
from minicpm_cli.server.inbox import Inbox
from minicpm_cli.types import Event, Request

_RATE_WINDOW = 64  # requests that finished, by which a waiting time is guessed
_LONGEST_WAIT = 60  # seconds that a client is told to wait at the most


class Engine(Protocol):
    """Runs requests somewhere else: in a thread, or in another process. Ids are never used twice."""

    @property
    def waiting(self) -> int:
        """Requests that the model has not begun to look at."""
        ...

    @property
    def dead(self) -> bool:
        """It has failed too often, and takes no more."""
        ...

    def start(self, tell: Callable[[Event], None]) -> None:
        """`tell` is given every event, in a thread of the engine's."""
        ...

    def put(self, requests: Sequence[Request]) -> None: ...

    def cancel(self, ident: str) -> None:
        """Its last event says "cancelled", unless it has had its last event."""
        ...

    def stop(self) -> None:
        """Cancels whatever is left, and waits for its end. No event is told after that."""
        ...


class Busy(MinicpmError):
    """The queue is full. `seconds` is when to try again."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting already. Try again in {seconds} s.")
        self.seconds = seconds


class EngineLoop:
    """`heard` is told each event of a known request, with its inbox.

    All of it belongs to the event loop's thread, but for `stop`, which waits.
    """

    def __init__(
        self, engine: Engine, max_queue: int, heard: Callable[[Event, Inbox], None] = lambda event, inbox: None
    ) -> None:
        self._engine, self._heard, self.max_queue = engine, heard, max_queue
        self._inboxes: dict[str, Inbox] = {}
        self._outbox: deque[Event] = deque()
        self._told = False  # the event loop will look into the outbox
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._events: asyncio.AbstractEventLoop | None = None

    def start(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._engine.start(self._tell)

    def stop(self) -> None:
        """Cuts what still runs off, and waits for its end."""
        self._engine.stop()

    @property
    def dead(self) -> bool:
        return self._engine.dead

    @property
    def waiting(self) -> int:
        return self._engine.waiting

    @property
    def unfinished(self) -> int:
        return len(self._inboxes)

    def check_room(self, count: int = 1) -> None:
        """Raises Busy for a full queue, RequestError for more than ever fits."""
        if count > self.max_queue:
            raise RequestError(
                "bad_parameter", f"the call asks for {count} answers; at most {self.max_queue} may wait in the queue"
            )
        if (waiting := self.waiting) + count > self.max_queue:
            raise Busy(waiting, self._wait_seconds(waiting))

    def submit(self, requests: Sequence[Request]) -> Inbox:
        """Puts requests, whose ids nobody else has, in line. Raises as `check_room`."""
        self.check_room(len(requests))
        inbox = Inbox([request.id for request in requests])
        self._inboxes.update((request.id, inbox) for request in requests)
        self._engine.put(requests)
        return inbox

    def cancel(self, inbox: Inbox) -> None:
        """Nobody reads this any more: what is not finished is dropped, its pages before the next step."""
        for ident in tuple(inbox.open):
            self._engine.cancel(ident)
            if self._inboxes.pop(ident, None) is not None:
                self._heard(Event(ident, finish="cancelled"), inbox)

    def _wait_seconds(self, waiting: int) -> int:
        """How long the queue takes at the pace of the last requests."""
        if len(self._ends) < 2 or (span := self._ends[-1] - self._ends[0]) <= 0:
            return 1
        return min(_LONGEST_WAIT, max(1, ceil(waiting * span / (len(self._ends) - 1))))

    # ---- between the threads --------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """The event loop is woken once for all events of a step: each waking costs it a system call."""
        self._outbox.append(event)
        if not self._told and self._events is not None and not self._events.is_closed():
            self._told = True
            self._events.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False
        inboxes, outbox, heard = self._inboxes, self._outbox, self._heard
        while outbox:
            event = outbox.popleft()
            inbox = inboxes.get(event.id)
            if inbox is None:
                continue
            if event.finish is not None:
                del inboxes[event.id]
                self._ends.append(time.monotonic())
            heard(event, inbox)
            inbox.put(event)
