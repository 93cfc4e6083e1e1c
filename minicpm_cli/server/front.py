"""The process that speaks HTTP for an engine in another one. See `minicpm_cli.server.apart`."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from minicpm_cli.errors import MinicpmError
from minicpm_cli.llm.info import LLMInfo, Occupancy, Totals
from minicpm_cli.server.apart import Setup
from minicpm_cli.server.app import Service
from minicpm_cli.server.engine_thread import too_late
from minicpm_cli.server.post import Begun, Cancel, Counts, Done, Ended, Post, Put, Say, Signal, Stop, received
from minicpm_cli.server.served import Texts
from minicpm_cli.server.serving import Serving, log_to_stderr
from minicpm_cli.types import Event, Request

_GONE = "the process of the engine has ended"


def run(pipe: Connection, sock: socket.socket) -> None:
    """Waits for the setup, serves, and says how it ended. Without a word if nobody is at the other end."""
    try:
        setup: Setup = pipe.recv()
        texts = setup.open_texts()
    except (EOFError, OSError):
        return
    post = Post(pipe)
    if setup.log:
        log_to_stderr()
    distant = Distant(setup.info, texts, pipe, post)
    service = Service(distant, setup.names, setup.defaults, setup.limits, setup.api_key, distant)
    serving = _Serving(service, lambda text: post.put(Say(text)), log=setup.log)
    distant.signalled = serving.signalled
    gc.freeze()
    try:
        serving.go(sock)
        post.put(Done(serving.cut))
    except MinicpmError as error:
        post.put(Done(serving.cut, str(error)))
    post.close()


class _Serving(Serving):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They come from the other process."""
        yield


class Distant:
    """The engine and the model in the other process, as far as HTTP needs them. See `Engine` and `Fronted`."""

    def __init__(self, info: LLMInfo, texts: Texts, pipe: Connection, post: Post) -> None:
        self.info, self._texts, self._pipe, self._post = info, texts, pipe, post
        self.totals, self.occupancy = Totals(), Occupancy()
        self.gpu_peak_bytes: int | None = None
        self.dead = False
        self.signalled: Callable[[int], None] = lambda number: None
        self._waiting: set[str] = set()
        self._open: set[str] = set()
        self._tell: Callable[[Event], None] = lambda event: None
        self._over = threading.Event()  # no event follows
        self._reader = threading.Thread(target=self._read, name="engine", daemon=True)
        self.encoded, self.prompt = texts.encoded, texts.prompt
        self.plain_ids, self.token_bytes = texts.plain_ids, texts.token_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._reader.start()

    def put(self, requests: Sequence[Request]) -> None:
        idents = {request.id for request in requests}
        self._waiting |= idents
        self._open |= idents
        if not self._over.is_set():
            self._post.put(Put(requests))
            return
        self._waiting -= idents
        self._open -= idents
        for ident in idents:
            self._tell(too_late(ident, dead=self.dead))

    def cancel(self, ident: str) -> None:
        self._post.put(Cancel(ident))

    def stop(self) -> None:
        self._post.put(Stop())
        self._over.wait()

    # ---- in the reader's thread -----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                self._heed(received(self._pipe))
        except Exception as error:  # noqa: BLE001 - nobody would hear of any other either
            if not isinstance(error, EOFError | OSError):
                traceback.print_exception(error, file=sys.stderr)
            self.dead = True
            self._over.set()  # first: what is put from now on is nobody's here
            self._waiting.clear()
            for ident in tuple(self._open):
                self._tell(Event(ident, finish="error", error=MinicpmError(_GONE)))

    def _heed(self, items: Iterator[Any]) -> None:
        for item in items:
            if type(item) is Event:
                if item.finish is not None:
                    self._open.discard(item.id)
                    self._waiting.discard(item.id)
                self._tell(item)
            else:
                self._note(item)

    def _note(self, item: Any) -> None:
        match item:
            case Ended(dead):
                self.dead = dead
                self._over.set()
            case Begun(ident):
                self._waiting.discard(ident)
            case Counts(totals, occupancy, peak):
                self.totals, self.occupancy, self.gpu_peak_bytes = totals, occupancy, peak
            case Signal(number):
                self.signalled(number)
