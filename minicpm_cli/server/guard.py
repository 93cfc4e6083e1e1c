"""What is looked at before a request is read: its key, its size, and whether the server still takes any."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minicpm_cli.server.drain import Drain
from minicpm_cli.server.faults import STOPPING, Fault

_OPEN = "/health"  # who watches a server need not be able to ask it
_READ_ON = 4  # times the size limit that is read and dropped, so that a client is still there to read the refusal


class Guard:
    """Plain ASGI, so that a client that goes away is seen behind it."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, max_body: int, drain: Drain, answered: Callable[[str, int], None]
    ) -> None:
        self._app, self._max_body, self._drain, self._answered = app, max_body, drain, answered
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault, send = self._fault(scope), self._counted(scope["path"], send)
        if fault is None:
            await self._app(scope, self._limited(receive), send)
            return
        await self._read_on(receive)
        await JSONResponse(fault.body, fault.status, dict(fault.headers))(scope, receive, send)

    def _counted(self, path: str, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(path, message["status"])
            await send(message)

        return counted

    def _fault(self, scope: Scope) -> Fault | None:
        if scope["path"] == _OPEN:
            return None
        if self._key is not None and not self._knows(scope):
            return Fault(
                401,
                "Incorrect API key. Send the server's --api-key in the header Authorization: Bearer KEY.",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._drain.begun and scope["method"] == "POST":
            return STOPPING
        length = next(_values(scope, b"content-length"), b"0")
        return _too_large(self._max_body) if length.isdigit() and int(length) > self._max_body else None

    def _knows(self, scope: Scope) -> bool:
        assert self._key is not None
        scheme, _, key = next(_values(scope, b"authorization"), b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    def _limited(self, receive: Receive) -> Receive:
        """Counts a body that does not say its length."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise HTTPException(413, _too_large(self._max_body).message)
            return message

        return counted

    async def _read_on(self, receive: Receive) -> None:
        left = _READ_ON * self._max_body
        while left > 0:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body"):
                return
            left -= len(message.get("body", b""))


def _values(scope: Scope, name: bytes) -> Iterator[bytes]:
    return (value for key, value in scope["headers"] if key == name)


def _too_large(limit: int) -> Fault:
    return Fault(413, f"the body is larger than the {limit:,} bytes that the server takes (--max-body)", "too_large")
