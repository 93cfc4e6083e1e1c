"""Lines are read, understood and tokenized ahead in a thread of their own, so that a GPU never waits for them.

A slow pipe, a slow disk and a slow tokenizer then cost nothing as long as the window holds rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from minicpm_cli.batch.records import Row
from minicpm_cli.batch.window import PrefixWindow, Ready

_FAILED_ROWS = 64  # in hand at most; also how many are told in one go, lest a million of them keep the model waiting
_LEFT_BEHIND = 0.2  # seconds for the thread to end; one that waits for a pipe is left to the end of the process


class Entry(Protocol):
    """Where rows queue for their place in the output."""

    @property
    def full(self) -> bool: ...

    def enter(self, line: int) -> None: ...


class Feed:
    """`prepare` makes a row ready for the model, or a row with an error; it is called in the thread.

    Every row `enter`s the output in the order of the input, before `items` hands it out. `error` is what ended the
    reading before its time: no reason not to answer what was read before.
    """

    def __init__(
        self,
        rows: Iterator[Row],
        prepare: Callable[[Row], Ready | Row],
        entry: Entry,
        window: PrefixWindow | None = None,
    ) -> None:
        self._rows, self._prepare, self._entry = rows, prepare, entry
        self._window = window or PrefixWindow()
        self._failed: deque[Row] = deque()
        self._changed = threading.Condition()
        self._stopped = self._ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="batch-feed", daemon=True)

    def start(self, first: Row) -> None:
        """`first` was read already, and has entered."""
        self._put(first)
        self._thread.start()

    def stop(self, *, patient: bool) -> None:
        """`patient`: the input is a file, whose reading always ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(None if patient else _LEFT_BEHIND)

    def wake(self) -> None:
        """Something has left the output's queue."""
        with self._changed:
            self._changed.notify_all()

    def computed(self, chain: Sequence[int]) -> None:
        """The prompt of this chain is in the cache."""
        with self._changed:
            self._window.computed(chain)

    def items(self, idle: Callable[[], bool]) -> Iterator[Ready | Row | None]:
        """Rows with errors before rows to run; None when there is nothing right now, unless `idle` says that nothing
        runs either.
        """
        told = 0
        while True:
            with self._changed:
                item = self._take(idle)
                if item is None and self._ended and not len(self._window):
                    return
            told = told + 1 if isinstance(item, Row) else 0
            yield item
            if told >= _FAILED_ROWS:
                told = 0
                yield None

    def _take(self, idle: Callable[[], bool]) -> Ready | Row | None:
        while not (self._failed or len(self._window) or self._ended) and idle():
            self._changed.wait()
        item: Ready | Row | None = None
        if self._failed:
            item = self._failed.popleft()
        elif len(self._window):
            if idle():
                self._window.hurry()
            item = self._window.take()
        if item is not None:
            self._changed.notify_all()
        return item

    def _work(self) -> None:
        try:
            for row in self._rows:
                if not self._admitted(row):
                    return
                self._put(row)
        except BaseException as error:  # noqa: BLE001 - for the thread that takes the rows
            self.error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _admitted(self, row: Row) -> bool:
        """Waits for room; False when nobody wants any more."""
        with self._changed:
            while self._full and not self._stopped:
                self._changed.wait()
            if not self._stopped:
                self._entry.enter(row.line)
            return not self._stopped

    @property
    def _full(self) -> bool:
        return self._window.full or len(self._failed) >= _FAILED_ROWS or self._entry.full

    def _put(self, row: Row) -> None:
        item = row if row.error is not None else self._prepare(row)
        with self._changed:
            if isinstance(item, Ready):
                self._window.add(item)
            else:
                self._failed.append(item)
            self._changed.notify_all()
