"""A process that dies, or whose disk is full, at a chosen operation on files."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ALL = -1


@dataclass
class Fate:
    """What happens at operation `at`, counted from 0: SIGKILL, or a disk that is `full` from then on.

    Of a write, `after` bytes are done before; of another operation nothing, or all of it for ALL. `writes` gets the
    number of each write to the file `watched`.
    """

    at: int = -1
    after: int = 0
    full: bool = False
    watched: str = ""
    count: int = 0
    writes: list[int] = field(default_factory=list)

    def due(self) -> bool:
        """Counts an operation."""
        self.count += 1
        return self.count - 1 == self.at or (self.full and 0 <= self.at < self.count)

    def strike(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), signal.SIGKILL)

    def before_or_after(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            due = self.due()
            if due and (self.full or self.after != ALL):
                self.strike()
            try:
                return real(*args, **more)
            finally:
                if due:
                    self.strike()

        return call


class MortalFile:
    """A file opened for writing, each of whose operations may be the last."""

    def __init__(self, file: Any, fate: Fate, name: str) -> None:
        self._file, self._fate, self._name = file, fate, name
        self.flush = fate.before_or_after(file.flush)

    def write(self, data: Any) -> int:
        fate = self._fate
        if self._name == fate.watched:
            fate.writes.append(fate.count)
        if fate.due():
            done = len(data) if fate.after == ALL else min(fate.after, len(data))
            self._file.write(bytes(data)[:done])
            if isinstance(self._file, io.FileIO) or fate.after % 2:  # of what is buffered, some reaches the disk
                with suppress(OSError):
                    self._file.flush()
            fate.strike()
        return int(self._file.write(data))

    def truncate(self, size: int) -> int:
        """A full disk keeps nobody from making a file shorter."""
        cut = self._file.truncate
        return int(cut(size) if self._fate.full else self._fate.before_or_after(cut)(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> MortalFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def make_mortal(fate: Fate) -> None:
    """From here on what this process does to files ends as `fate` says. For a child: it is never undone."""
    real = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if not set(mode) & set("wa+"):
            return real(file, mode, *args, **more)
        fated = real if fate.full and os.path.exists(file) else fate.before_or_after(real)
        return MortalFile(fated(file, mode, *args, **more), fate, str(file))

    builtins.open = opened
    os.fsync = fate.before_or_after(os.fsync)  # type: ignore[assignment]
    if not fate.full:
        os.replace = fate.before_or_after(os.replace)  # type: ignore[assignment]
        os.unlink = fate.before_or_after(os.unlink)  # type: ignore[assignment]
