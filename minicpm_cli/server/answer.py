"""An answer on its way to one client: whole, or as server-sent events. Who goes away takes the requests along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minicpm_cli.server.faults import STOPPING, Fault, fault_of
from minicpm_cli.server.inbox import Inbox, is_plain, joined
from minicpm_cli.server.loop import EngineLoop
from minicpm_cli.server.outlet import Outlet, outlet_of
from minicpm_cli.server.shapes import Choice, Json, Shape, usage_of
from minicpm_cli.types import Channel, Event, Request, Usage

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_PLACE = "\ue000text\ue000"
_DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects would show nothing until the end
)


@dataclass(frozen=True, slots=True)
class Form:
    """How the client wants it."""

    stream: bool = False
    include_usage: bool = False


class Watched(Response):
    """An answer that ends, and takes its requests along, when its client goes away.

    The status is known when the first event is: what the engine refuses is no stream with an error in it.
    """

    media_type = "application/json"

    def __init__(self, engine: EngineLoop, inbox: Inbox) -> None:
        super().__init__()
        self._engine, self._inbox = engine, inbox

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send(scope, send))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            self._engine.cancel(self._inbox)
            for task in (work, watch):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


class Answer(Watched):
    """`choices` are the requests in the order of their index; `each` of their prompts has so many of them."""

    def __init__(self, engine: EngineLoop, inbox: Inbox, choices: Sequence[Request], each: int, shape: Shape) -> None:
        super().__init__(engine, inbox)
        self._shape, self._each = shape, each
        self._index = {request.id: i for i, request in enumerate(choices)}
        self._around: dict[tuple[int, Channel], tuple[bytes, bytes]] = {}
        self._outlet: Outlet | None = None
        self.form = Form()

    async def _send(self, scope: Scope, send: Send) -> None:
        self._outlet = outlet_of(scope)
        await (self._stream(send) if self.form.stream else self._whole(send))

    # ---- in one piece ---------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        choices = [Choice() for _ in self._index]

        def add(event: Event) -> bool:
            """Nobody need be woken for a piece of text."""
            if plain := is_plain(event):
                choices[self._index[event.id]].add(event)
            return plain

        while not self._inbox.over:
            for event in await self._inbox.take(add):
                if (fault := fault_in(event)) is not None:
                    await send_fault(send, fault)
                    return
                choices[self._index[event.id]].add(event)
        body = self._shape.whole(choices, self._usage([choice.usage or Usage(0, 0) for choice in choices]))
        await send_json(send, 200, body)

    def _usage(self, usages: Sequence[Usage]) -> Json:
        return usage_of(usages[:: self._each], usages)

    # ---- as a stream ----------------------------------------------------------------------------------------------

    async def _stream(self, send: Send) -> None:
        events = await self._inbox.take()
        if (fault := fault_in(events[0])) is not None:
            await send_fault(send, fault)
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        usages = [Usage(0, 0) for _ in self._index]
        begun = [chunk for i in range(len(self._index)) if (chunk := self._shape.begin(i)) is not None]
        before = list(map(self._frame, begun))
        while True:
            frames, failed = self._frames(events, usages)
            over = failed or self._inbox.over
            tail = self._tail(usages) if over and not failed else b""
            await send_part(send, b"".join([*before, *frames, tail]), more=not over)
            if over:
                return
            before = []
            events = await self._inbox.take(self._straight if self._outlet is not None else None)

    def _tail(self, usages: Sequence[Usage]) -> bytes:
        """What stands behind all choices."""
        return (_frame(self._shape.last(self._usage(usages))) if self.form.include_usage else b"") + _DONE

    def _straight(self, event: Event) -> bool:
        """Writes a piece of text; anything else, and a client that is slow, is left to `_stream`."""
        outlet = self._outlet
        if outlet is None or not is_plain(event) or not outlet.open:
            return False
        if frame := self._text(self._index[event.id], event):
            outlet.write(frame)
        return True

    def _frames(self, events: Sequence[Event], usages: list[Usage]) -> tuple[list[bytes], bool]:
        """What to send of these events, and whether one of them was an error, which ends the stream."""
        frames: list[bytes] = []
        for event in joined(events):
            index = self._index[event.id]
            if (fault := fault_in(event)) is not None:
                return [*frames, _frame(fault.body)], True
            if is_plain(event):
                frames.append(self._text(index, event))
            elif (piece := self._shape.piece(index, event)) is not None:
                frames.append(self._frame(piece))
            if event.finish is not None:
                usages[index] = event.usage or usages[index]
                frames.append(self._frame(self._shape.end(index, event.finish)))
        return frames, False

    def _text(self, index: int, event: Event) -> bytes:
        """The frame of nothing but text: all but that is the same each time, and written once."""
        around = self._around.get((index, event.channel))
        if around is None:
            whole = self._frame(self._shape.piece(index, replace(event, text=_PLACE)) or {})
            before, _, after = whole.partition(json_bytes(_PLACE))
            around = self._around[index, event.channel] = (before, after)
        return around[0] + json_bytes(event.text) + around[1] if event.text else b""

    def _frame(self, chunk: Json) -> bytes:
        return _frame({**chunk, "usage": None} if self.form.include_usage else chunk)


def fault_in(event: Event) -> Fault | None:
    """Why there is no answer; requests whose clients are still there are cancelled only when the server is cut off."""
    if event.finish == "cancelled":
        return STOPPING
    return fault_of(event.error) if event.finish == "error" else None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _frame(chunk: Any) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"


def json_bytes(value: Any) -> bytes:
    return _ENCODE(value).encode("utf-8", "replace")


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_fault(send: Send, fault: Fault) -> None:
    await send_json(send, fault.status, fault.body, fault.headers)


async def send_json(send: Send, status: int, body: Any, headers: Any = None) -> None:
    raw = json_bytes(body)
    lines = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
    encoded = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": raw, "more_body": False})
