"""Whether the server still takes requests. After a signal it finishes what it has taken and refuses the rest."""

from __future__ import annotations

import time


class Drain:
    """`patience` seconds are given to what runs."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since: float | None = None

    @property
    def begun(self) -> bool:
        return self._since is not None

    @property
    def overdue(self) -> bool:
        return self._since is not None and time.monotonic() - self._since > self._patience

    def begin(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
