"""The engine in a thread of its own. Requests are pulled from its queue between steps."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from minicpm_cli.server.faults import FAILED, Refused
from minicpm_cli.server.served import Served
from minicpm_cli.types import Event, Request

_FAILURES = 3  # of the loop itself, with no request finished between them, before the server gives up


def too_late(ident: str, *, dead: bool) -> Event:
    """What becomes of a request that an engine gets when it has ended."""
    return Event(ident, finish="error", error=Refused(FAILED)) if dead else Event(ident, finish="cancelled")


def _unheard(*what: object) -> None:
    pass


class EngineThread:
    """See `minicpm_cli.server.loop.Engine`. `begun` is told which request the model pulls, `ended` of the last one."""

    def __init__(
        self, llm: Served, begun: Callable[[str], None] = _unheard, ended: Callable[[], None] = _unheard
    ) -> None:
        self._llm, self._begun, self._ended = llm, begun, ended
        self._pending: deque[Request] = deque()
        self._running: set[str] = set()  # pulled by the engine, not finished
        self._changed = threading.Condition()
        self._closed = self.dead = False
        self._failures = 0
        self._tell: Callable[[Event], None] = _unheard
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def start(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._thread.start()

    def put(self, requests: Sequence[Request]) -> None:
        """One whose body or tokens took until after the end hears at once that it came too late."""
        with self._changed:
            if not (late := self._closed or self.dead):
                self._pending.extend(requests)
                self._changed.notify_all()
        if late:
            for request in requests:
                self._tell(too_late(request.id, dead=self.dead))

    def cancel(self, ident: str) -> None:
        with self._changed:
            waiting = next((request for request in self._pending if request.id == ident), None)
            if waiting is not None:
                self._pending.remove(waiting)
        if waiting is None:
            self._llm.cancel(ident)
        else:
            self._tell(Event(ident, finish="cancelled"))

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            left = [*self._running, *(request.id for request in self._pending)]
            self._changed.notify_all()
        for ident in left:
            self.cancel(ident)
        if self._thread.ident is not None:
            self._thread.join()

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed and not self.dead:
            try:
                with closing(self._llm.stream(self._requests())) as events:
                    for event in events:
                        if event.finish is not None:
                            self._finished(event.id)
                        self._tell(event)
            except Exception as error:  # noqa: BLE001 - a defect of one step must not end the server
                self._failed(error)
        self._ended()

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
            if request is not None:
                self._begun(request.id)
            yield request

    def _finished(self, ident: str) -> None:
        with self._changed:
            self._running.discard(ident)
        self._failures = 0

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
