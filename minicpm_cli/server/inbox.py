"""What comes for one call, in the thread of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from minicpm_cli.types import Event

_GATHERED = 256  # events of a slow client that lie one by one, a few hundred bytes each; then their texts are joined
Straight = Callable[[Event], bool]


class Inbox:
    """The events of the requests of one call. `open` are those not yet finished."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.open = set(ids)
        self.begun = time.monotonic()
        self._events: list[Event] = []
        self._most = _GATHERED
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
        if len(self._events) > self._most:
            self._events = list(joined(self._events))
            self._most = _GATHERED + 2 * len(self._events)

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


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """A client that reads slower than the model writes gets several tokens' text in one piece."""
    for _, run in groupby(events, _kind):
        first, *rest = run
        yield replace(first, text="".join([first.text, *(event.text for event in rest)])) if rest else first


def is_plain(event: Event) -> bool:
    """Nothing but text."""
    return event.finish is None and not event.logprobs and event.tool_call is None


def _kind(event: Event) -> object:
    """Equal for those whose texts are one."""
    return (event.id, event.channel) if is_plain(event) else id(event)
