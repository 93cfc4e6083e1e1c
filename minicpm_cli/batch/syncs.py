"""fsync in a thread of its own: a slow disk would keep a GPU waiting."""

from __future__ import annotations

import os
import threading

SECONDS = 1.0  # between two syncs: a power cut loses the rows of that time


class Syncs:
    """A thread that fsyncs a file some time after somebody has wanted it, however long nobody does then."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._error: OSError | None = None
        self.done = 0
        self._thread = threading.Thread(target=self._work, name="batch-sync", daemon=True)
        self._thread.start()

    def want(self) -> None:
        if not self._wanted:
            with self._changed:
                self._wanted = True
                self._changed.notify()

    def check(self) -> None:
        """Raises what a sync has met."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while self._is_time():
            try:
                os.fsync(self._descriptor)
            except OSError as e:
                self._error = e
            self.done += 1

    def _is_time(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            self._changed.wait_for(lambda: self._closed, SECONDS)
            self._wanted = False  # whoever writes from now on wants another one
            return not self._closed
