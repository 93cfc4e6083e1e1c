"""What comes for one call, in the thread of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from minicpm_cli.types import Event

Straight = Callable[[Event], bool]


class Inbox:
    """The events of the requests of one call. `open` are those not yet finished."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.open = set(ids)
        self.begun = time.monotonic()
        self._events: list[Event] = []
        self._ready = asyncio.Event()
        self._straight: Straight | None = None

    @property
    def over(self) -> bool:
        """Whether nothing comes any more, and all of it was taken: a slow client's last events may still lie here."""
        return not self.open and not self._events

    def put(self, event: Event) -> None:
        if self._straight is not None and not self._events and self._straight(event):
            return
        if event.finish is not None:
            self.open.discard(event.id)
        self._events.append(event)
        self._ready.set()

    async def take(self, straight: Straight | None = None) -> list[Event]:
        """What has come since the last call, at least one event.

        While this waits, `straight` is given each event first, and says whether it has dealt with it: whoever streams
        need not be woken for each token.
        """
        self._straight = straight
        try:
            await self._ready.wait()
        finally:
            self._straight = None
        self._ready.clear()
        events, self._events = self._events, []
        return events
