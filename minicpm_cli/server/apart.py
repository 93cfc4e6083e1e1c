"""A server in two processes: this one runs the engine, the other one speaks HTTP.

Tokens of 256 streams take a core's time to write, and Python has one core for a process: in one, they would keep the
engine from launching its steps.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from minicpm_cli.errors import MinicpmError
from minicpm_cli.llm.info import LLMInfo
from minicpm_cli.server.engine_thread import EngineThread
from minicpm_cli.server.post import Begun, Cancel, Counts, Done, Ended, Post, Put, Say, Signal, Stop, received
from minicpm_cli.server.served import Limits, Served, Texts
from minicpm_cli.types import Event, SamplingParams

_REPORT = 0.25  # seconds between two counts for /metrics
_LAST_SECONDS = 10  # for clients to read what is written
_PATIENT = 2  # signals that the other process is left to heed: the second cuts requests off
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the other process must know. `open_texts` is called there; `log` writes a line for each request."""

    open_texts: Callable[[], Texts]
    info: LLMInfo
    names: tuple[str, ...]
    defaults: SamplingParams
    limits: Limits
    api_key: str | None = None
    log: bool = False


class Front:
    """The process that speaks HTTP. It is started before the model is loaded, and waits for its setup."""

    def __init__(self, sock: socket.socket) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would take the GPU's context along
        self.pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_front, args=(theirs, sock), name="http", daemon=True)
        self._process.start()
        self._serves = False
        theirs.close()

    def __enter__(self) -> Front:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It ends by itself when nobody is at the other end of its pipe; before it serves it is not waited for."""
        self.pipe.close()
        self._process.join(_LAST_SECONDS if self._serves else 0)
        self._process.kill()
        self._process.join()

    def serve(self, llm: Served, setup: Setup, say: Callable[[str], None]) -> bool:
        """Until a signal. Returns whether requests were cut off. Raises MinicpmError if a part of it has failed."""
        self._serves = True
        with suppress(OSError):  # it is gone, which reading finds
            self.pipe.send(setup)
        gc.freeze()  # the model's objects live as long as this does: looking through them holds steps up
        back = Back(llm, self.pipe, say)
        try:
            done = back.run()
        finally:
            back.close()
        if done.error is not None:
            raise MinicpmError(done.error)
        return done.cut


def _front(pipe: Connection, sock: socket.socket) -> None:
    for number in _SIGNALS:  # a terminal sends them to both, who starts programs to one of the two
        signal.signal(number, signal.SIG_IGN)
    from minicpm_cli.server.front import run

    run(pipe, sock)


class Back:
    """The engine, as the other process tells it."""

    def __init__(self, llm: Served, pipe: Connection, say: Callable[[str], None]) -> None:
        self._llm, self._pipe, self._say = llm, pipe, say
        self._post = Post(pipe)
        self._engine = EngineThread(llm, self._begun, self._ended)
        self._counts: Counts | None = None

    def run(self) -> Done:
        """Raises MinicpmError when the other process goes without a word."""
        self._engine.start(self._tell)
        with self._signals():
            try:
                while (done := self._turn()) is None:
                    self._report()
                return done
            except (EOFError, OSError):
                raise MinicpmError("the process that speaks HTTP has ended; start the server again") from None

    def close(self) -> None:
        self._engine.stop()
        self._post.close()

    def _turn(self) -> Done | None:
        if not self._pipe.poll(_REPORT):
            return None
        for item in received(self._pipe):
            if isinstance(item, Done):
                return item
            self._heed(item)
        return None

    def _heed(self, item: Any) -> None:
        match item:
            case Put(requests):
                self._engine.put(requests)
            case Cancel(ident):
                self._engine.cancel(ident)
            case Say(text):
                self._say(text)
            case Stop():
                self._engine.stop()

    def _report(self) -> None:
        llm = self._llm
        counts = Counts(llm.totals, llm.occupancy, llm.gpu_peak_bytes)
        if counts != self._counts:
            self._counts = counts
            self._post.put(counts)

    # ---- in the engine's thread -----------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if event.error is not None:
            event = replace(event, error=_portable(event.error))
        self._post.put(event)

    def _begun(self, ident: str) -> None:
        self._post.put(Begun(ident))

    def _ended(self) -> None:
        self._post.put(Ended(self._engine.dead))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The other process hears those that come here, and of no others."""

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard_before: list[int] = []

        def heard(number: int, frame: Any) -> None:
            heard_before.append(number)
            if len(heard_before) > _PATIENT:
                raise KeyboardInterrupt
            self._post.put(Signal(number))

        before = {number: signal.signal(number, heard) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _portable(error: Exception) -> Exception:
    """What a client is told of it: not every exception can be pickled."""
    from minicpm_cli.server.faults import Refused, fault_of

    return Refused(fault_of(error))
