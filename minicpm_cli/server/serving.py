"""The server's life: a socket before the model, requests until a signal, then those that were taken."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from minicpm_cli.errors import MinicpmError
from minicpm_cli.server.address import address_of
from minicpm_cli.server.app import Service, build_app
from minicpm_cli.server.outlet import with_outlets

# A decode step of a small model takes 2 ms; by default a thread may keep the others from running for 5 ms.
_TURN_SECONDS = 0.0005
_KEEP_ALIVE = 65  # seconds that an idle connection stays open: longer than clients keep theirs in hand
_LAST_BYTES = 5  # seconds for clients to read what is written, when all requests are done
_BACKLOG = 2048
_TICKS = 10  # a second


class Serving(uvicorn.Server):
    """`say` tells the user what happens. A first signal lets requests finish, a second one cuts them off."""

    def __init__(self, service: Service, say: Callable[[str], None], *, log: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=with_outlets(AutoHTTPProtocol),
                log_config=None,
                access_log=log,
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_BYTES,
                backlog=_BACKLOG,
            )
        )
        self._service, self._say = service, say
        self._address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cut = False  # requests were left unfinished

    def go(self, sock: socket.socket) -> None:
        """Returns when all is done. Raises MinicpmError if the engine has failed for good."""
        self._address = address_of(sock)
        before = sys.getswitchinterval()
        sys.setswitchinterval(_TURN_SECONDS)
        try:
            self.run(sockets=[sock])
        finally:
            sys.setswitchinterval(before)
        if self._service.engine.dead:
            raise MinicpmError(
                "the engine failed several times in a row; its errors are above. Start the server again."
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        info = self._service.llm.info
        self._say(
            f"{self._service.names[0]} is served at {self._address}/v1: {info.max_seqs} requests at once, "
            f"{info.context:,} tokens of context. Ctrl-C stops."
        )

    def signalled(self, number: int) -> None:
        """As if this process had got the signal; from any thread, once it has started."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.handle_exit, number, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would stop listening at once, and new clients would find nobody to tell them why."""
        count = self._service.engine.unfinished
        if self._service.drain.begun or not count:
            self._end()
        else:
            self._service.drain.begin()
            self._say(f"finishing {count} requests; another signal cuts them off")

    async def on_tick(self, counter: int) -> bool:
        engine, drain = self._service.engine, self._service.drain
        if counter % _TICKS == 0:
            self._service.metrics.tick()
        if engine.dead or (drain.begun and (drain.overdue or not engine.unfinished)):
            self._end()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await run_in_threadpool(self._service.engine.stop)  # those who are cut off are told so
        await super().shutdown(sockets)

    def _end(self) -> None:
        self._service.drain.begin()
        self.cut = self.cut or self._service.engine.unfinished > 0
        self.should_exit = True


def log_to_stderr() -> None:
    """One line for each request, and what uvicorn has to say."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
