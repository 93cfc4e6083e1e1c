"""/v1/responses: OpenAI's newer call, whose conversations this server remembers for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Scope, Send

from minicpm_cli.server.answer import STREAM_HEADERS, Watched, fault_in, json_bytes, send_fault, send_json, send_part
from minicpm_cli.server.asked import choices
from minicpm_cli.server.documented import ERRORS, NO_MODEL, STREAM
from minicpm_cli.server.faults import Fault, refused
from minicpm_cli.server.inbox import Inbox, joined
from minicpm_cli.server.loop import EngineLoop
from minicpm_cli.server.responses_asked import response_params, response_prompt, turns_of
from minicpm_cli.server.responses_items import Items
from minicpm_cli.server.responses_schema import ResponsesRequest
from minicpm_cli.server.shapes import Head, Json
from minicpm_cli.types import Event, Message, SamplingParams, Usage

if TYPE_CHECKING:
    from minicpm_cli.server.app import Service

RESPONSES = "/v1/responses"
_BYTES = 64 << 20  # of conversations that are remembered
_CUT = {"length": "max_output_tokens", "malformed_tool_call": "malformed_tool_call"}  # why an answer is incomplete
_NOT_FOUND: dict[int | str, dict[str, Any]] = {401: ERRORS[401], 404: NO_MODEL[404]}


class Store:
    """The newest answers and the conversations that they end, in memory alone."""

    def __init__(self, most: int = _BYTES) -> None:
        self._kept: OrderedDict[str, tuple[tuple[Message, ...], Json, int]] = OrderedDict()
        self._most, self._size = most, 0

    def put(self, turns: tuple[Message, ...], body: Json) -> None:
        size = sum(len(turn.content) + len(turn.reasoning or "") + 256 for turn in turns) + len(json_bytes(body))
        self._kept[body["id"]] = turns, body, size
        self._size += size
        while self._size > self._most:
            self.drop(next(iter(self._kept)))

    def drop(self, ident: str) -> None:
        self._size -= self._kept.pop(ident)[2]

    def turns(self, ident: str) -> tuple[Message, ...]:
        return self._found(ident, "previous_response_id")[0]

    def body(self, ident: str) -> Json:
        return self._found(ident, "response_id")[1]

    def _found(self, ident: str, param: str) -> tuple[tuple[Message, ...], Json, int]:
        """Raises Refused."""
        if ident not in self._kept:
            why = "this server keeps the newest ones in memory, without store: false, for as long as it runs"
            raise refused(404, f"There is no response `{ident}`; {why}.", "response_not_found", param)
        self._kept.move_to_end(ident)
        return self._kept[ident]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer in the making. `count` tells how many tokens a text has."""

    head: Head
    asked: ResponsesRequest
    params: SamplingParams
    turns: tuple[Message, ...]
    items: Items
    store: Store
    count: Callable[[str], int]

    def body(self, status: str, **more: Any) -> Json:
        asked = self.asked
        told: Json = {"id": self.head.id, "object": "response", "created_at": self.head.created, "status": status}
        told |= {"error": None, "incomplete_details": None, "model": self.head.model, "output": self.items.output}
        told |= {"instructions": asked.instructions, "max_output_tokens": self.params.max_tokens, "background": False}
        told |= {"previous_response_id": asked.previous_response_id, "store": asked.store is not False, "usage": None}
        told |= {"temperature": self.params.temperature, "top_p": self.params.top_p, "truncation": "disabled"}
        told |= {"parallel_tool_calls": asked.parallel_tool_calls is not False, "metadata": asked.metadata or {}}
        told |= {"tools": asked.tools or [], "tool_choice": asked.tool_choice or "auto", "user": asked.user}
        told |= {"text": {"format": {"type": "text"}} | _given(asked.text), "reasoning": _given(asked.reasoning)}
        return told | more

    async def finished(self, event: Event) -> Json:
        """The whole answer, remembered unless the client said not to."""
        usage, reason = event.usage or Usage(0, 0), _CUT.get(event.finish or "")
        thought = await run_in_threadpool(self.count, self.items.thought) if self.items.thought else 0
        details = {"incomplete_details": {"reason": reason}} if reason else {}
        body = self.body("incomplete" if reason else "completed", usage=_usage(usage, thought), **details)
        if self.asked.store is not False:
            self.store.put((*self.turns, self.items.message()), body)
        return body

    def failed(self, fault: Fault) -> Json:
        return self.body("failed", error={"code": fault.code or "server_error", "message": fault.message})


def _given(options: Any) -> Json:
    return options.model_dump(by_alias=True, exclude_none=True) if options is not None else {}


def _usage(usage: Usage, thought: int) -> Json:
    read, written = usage.prompt_tokens, usage.completion_tokens
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": min(thought, written)},
        "total_tokens": read + written,
    }


class ResponseAnswer(Watched):
    """Whole, or as the events that lead to it."""

    def __init__(self, engine: EngineLoop, inbox: Inbox, turn: Turn) -> None:
        super().__init__(engine, inbox)
        self._turn, self._number = turn, 0

    async def _send(self, scope: Scope, send: Send) -> None:
        events = await self._inbox.take()
        if (fault := fault_in(events[0])) is not None:
            await send_fault(send, fault)
        elif self._turn.asked.stream:
            await self._stream(events, send)
        else:
            await self._whole(events, send)

    async def _whole(self, events: Sequence[Event], send: Send) -> None:
        while True:
            for event in events:
                if (fault := fault_in(event)) is not None:
                    await send_fault(send, fault)
                    return
                self._pieces(event)
                if event.finish is not None:
                    await send_json(send, 200, await self._turn.finished(event))
                    return
            events = await self._inbox.take()

    def _pieces(self, event: Event) -> list[Json]:
        items = self._turn.items
        return [*items.add(event), *(items.end(event.finish) if event.finish is not None else ())]

    async def _stream(self, events: Sequence[Event], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        begun = self._turn.body("in_progress")
        frames = [self._frame({"type": f"response.{name}", "response": begun}) for name in ("created", "in_progress")]
        while True:
            over = False
            for event in joined(events):
                if (fault := fault_in(event)) is not None:
                    frames.append(self._frame({"type": "response.failed", "response": self._turn.failed(fault)}))
                    over = True
                    break
                frames += map(self._frame, self._pieces(event))
                if event.finish is not None:
                    body = await self._turn.finished(event)
                    frames.append(self._frame({"type": f"response.{body['status']}", "response": body}))
                    over = True
            await send_part(send, b"".join(frames), more=not over)
            if over:
                return
            frames, events = [], await self._inbox.take()

    def _frame(self, event: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes({**event, "sequence_number": number}))


def add_responses(app: FastAPI, service: Service) -> None:
    store = Store()

    @app.post(RESPONSES, responses={**ERRORS, **NO_MODEL, **STREAM}, response_model=None)
    async def responses(asked: ResponsesRequest) -> Response:
        """Answers an input, or what follows an earlier answer."""
        service.check(asked.model)
        params = response_params(asked, service.defaults)
        before = store.turns(asked.previous_response_id) if asked.previous_response_id else ()
        turns = (*before, *turns_of(asked.input))
        head = service.head("resp_")
        prompt = await service.encoded(response_prompt(head.id, asked, turns, params))
        items = Items(head.id.removeprefix("resp_"), service.llm.token_bytes)
        turn = Turn(head, asked, params, turns, items, store, lambda text: len(service.llm.plain_ids(text)))
        return ResponseAnswer(service.engine, service.engine.submit(choices(head.id, [prompt], 1)), turn)

    @app.get(RESPONSES + "/{response_id}", responses=_NOT_FOUND, response_model=None)
    async def kept(response_id: str) -> Response:
        """An answer that was given, if it is still remembered."""
        return JSONResponse(store.body(response_id))

    @app.delete(RESPONSES + "/{response_id}", responses=_NOT_FOUND, response_model=None)
    async def forgotten(response_id: str) -> Response:
        """Forgets an answer, and the conversation that it ended."""
        store.body(response_id)
        store.drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
