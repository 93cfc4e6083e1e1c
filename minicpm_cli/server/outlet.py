"""The socket behind an answer. Pieces of streams go straight to it: asking the framework for each costs twice as much.

uvicorn's protocol writes the head of a response and its end; between them, chunks of HTTP/1.1 are nobody's secret.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope

_STATE = "minicpm.outlet"


class Outlet:
    """Of one connection. `open` is false while its client reads slower than we write, or has gone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._write, self._closing = transport.write, transport.is_closing
        self.paused = False

    @property
    def open(self) -> bool:
        return not self.paused and not self._closing()

    def write(self, body: bytes) -> None:
        """A chunk of the body, which must not be empty."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


def outlet_of(scope: Scope) -> Outlet | None:
    """None where the server is not ours, or the client does not know chunks."""
    found = scope.get("state", {}).get(_STATE)
    return found if isinstance(found, Outlet) and scope.get("http_version") == "1.1" else None


def with_outlets(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's `protocol`, whose requests find their connection's outlet in their state."""
    kind: Any = protocol

    class WithOutlet(kind):  # type: ignore[misc]
        app_state: dict[str, Any]
        outlet: Outlet | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.outlet = Outlet(transport)
            self.app_state = {**self.app_state, _STATE: self.outlet}

        def pause_writing(self) -> None:
            self._pause(True)
            super().pause_writing()

        def resume_writing(self) -> None:
            self._pause(False)
            super().resume_writing()

        def _pause(self, paused: bool) -> None:
            if self.outlet is not None:
                self.outlet.paused = paused

    return WithOutlet
