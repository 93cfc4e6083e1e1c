"""A worker as its fleet sees it: messages go out through a thread, and come in through another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Protocol

from minicpm_cli.errors import MinicpmError
from minicpm_cli.fleet.messages import Ask, Failed, FromWorker, Order, ToWorker, Unsent

_SECONDS = 10.0  # for a worker to end by itself, and to be gone when it is killed
# With our path: in the folder that a user is in, random.py may be anything.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from minicpm_cli.fleet.worker import main; main(int(sys.argv[1]))"


class Link(Protocol):
    """`begin` says where messages go; None says that the worker is gone."""

    def begin(self, told: Callable[[FromWorker | None], None]) -> None: ...
    def send(self, message: ToWorker) -> None: ...

    def close(self) -> None:
        """Tells the worker to end."""

    def kill(self) -> None:
        """Ends it at once, whatever it does."""

    def join(self) -> None:
        """Waits for its end, after `close`."""


class ConnectionLink:
    """Whoever waits for a worker to read must not keep the others waiting: hence the thread that sends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._deadline = 0.0

    def begin(self, told: Callable[[FromWorker | None], None]) -> None:
        for name, work in (("send", self._send), ("hear", self._hear)):
            self._threads.append(threading.Thread(target=work, args=(told,), name=f"fleet-{name}", daemon=True))
            self._threads[-1].start()

    def send(self, message: Any) -> None:
        self._out.put(message)

    def close(self) -> None:
        self._out.put(None)
        self._deadline = time.monotonic() + _SECONDS

    def kill(self) -> None:
        with suppress(OSError):
            shut(self._connection, socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(max(self._deadline - time.monotonic(), 0))
        if not any(thread.is_alive() for thread in self._threads):  # else another file might get the number
            self._connection.close()

    def _send(self, told: Callable[[FromWorker | None], None]) -> None:
        with suppress(OSError):
            while (message := self._out.get()) is not None:
                if (raw := pickled(message, told)) is not None:
                    self._connection.send_bytes(raw)
        with suppress(OSError):
            shut(self._connection, socket.SHUT_WR)

    def _hear(self, told: Callable[[FromWorker | None], None]) -> None:
        try:
            while True:
                told(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - what cannot be understood must not end in silence
            told(Failed(MinicpmError(f"what it said cannot be read: {type(error).__name__}: {error}")))
        told(None)


def pickled(message: Any, told: Callable[[FromWorker | None], None]) -> bytes | memoryview | None:
    """None for a request that cannot be, as one of too deep a schema, which is told."""
    try:
        return ForkingPickler.dumps(message)
    except Exception as error:  # noqa: BLE001 - that of one request must not end the sending of the others
        if isinstance(message, Ask):
            told(Unsent(message.epoch, message.request.id, MinicpmError(f"it cannot be sent to a worker: {error}")))
        return None


def shut(connection: Connection, how: int) -> None:
    """The other side hears that no more will come. To close it would not do: another thread is reading from it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(how)


class ProcessLink(ConnectionLink):
    """A process on this machine. Its standard output is not ours, where answers may go."""

    def __init__(self, order: Order) -> None:
        ours, theirs = Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-c", _PROGRAM, str(number), *sys.path]
        with _uninterrupted():
            self._process = subprocess.Popen(
                command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        theirs.close()
        self._ready = False
        super().__init__(ours)
        self.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, told: Callable[[FromWorker | None], None]) -> None:
        def noted(message: FromWorker | None) -> None:
            self._ready = True
            told(message)

        super().begin(noted)

    def close(self) -> None:
        super().close()
        if not self._ready:  # it is loading, and looks at nothing meanwhile
            self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in a driver: nobody can end it
            self._process.wait(_SECONDS)

    def join(self) -> None:
        try:
            self._process.wait(max(self._deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.kill()
        self._deadline += 1  # its end of the connection is closed now
        super().join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process that begins here is deaf to Ctrl-C from its first moment; ours hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
