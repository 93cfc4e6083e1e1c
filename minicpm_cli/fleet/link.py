"""A worker as its fleet sees it: messages go out through a thread, and come in through another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any, Protocol

from minicpm_cli.fleet.messages import FromWorker, Order, ToWorker

_SECONDS = 10.0  # for a worker to end by itself


class Link(Protocol):
    """`begin` says where messages go; None says that the worker is gone."""

    def begin(self, told: Callable[[FromWorker | None], None]) -> None: ...
    def send(self, message: ToWorker) -> None: ...

    def close(self) -> None:
        """Tells the worker to end."""

    def join(self) -> None:
        """Waits for its end, after `close`."""


class ConnectionLink:
    """Whoever waits for a worker to read must not keep the others waiting: hence the thread that sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._out: SimpleQueue[Any] = SimpleQueue()

    def begin(self, told: Callable[[FromWorker | None], None]) -> None:
        for name, work in (("send", self._send), ("hear", lambda: self._hear(told))):
            threading.Thread(target=work, name=f"fleet-{name}", daemon=True).start()

    def send(self, message: Any) -> None:
        self._out.put(message)

    def close(self) -> None:
        self._out.put(None)

    def join(self) -> None:
        pass

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._out.get()) is not None:
                self._connection.send(message)
        with suppress(OSError):
            _end(self._connection)

    def _hear(self, told: Callable[[FromWorker | None], None]) -> None:
        with suppress(EOFError, OSError):
            while True:
                told(self._connection.recv())
        told(None)


def _end(connection: Connection) -> None:
    """The other side hears that no more will come. To close it would not do: another thread is reading from it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_WR)


class ProcessLink(ConnectionLink):
    """A process on this machine."""

    def __init__(self, order: Order) -> None:
        ours, theirs = Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-m", "minicpm_cli.fleet.worker", str(number)]
        self._process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
        theirs.close()
        self._deadline = 0.0
        super().__init__(ours)
        self.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        super().close()
        self._deadline = time.monotonic() + _SECONDS

    def join(self) -> None:
        try:
            self._process.wait(max(self._deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
