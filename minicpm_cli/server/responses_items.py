"""An answer as the items and events of /v1/responses: a thought, a text, calls, each with its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minicpm_cli.server.shapes import Json, TokenBytes, logprobs_of
from minicpm_cli.types import Event, Logprob, Message, ToolCall, ToolCallDelta

_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}


@dataclass(slots=True)
class _Item:
    """`place` is its index among the items that were begun; `call` of a function call."""

    kind: str
    id: str
    place: int
    call: ToolCallDelta | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Items:
    """What one request has answered so far. Each method gives the events that a stream tells of it."""

    def __init__(self, base: str, token_bytes: TokenBytes) -> None:
        self._base, self._token_bytes = base, token_bytes
        self._open: _Item | None = None
        self._begun = 0
        self._done: list[tuple[_Item, str]] = []  # with its status
        self._void: list[str] = []

    def add(self, event: Event) -> Iterator[Json]:
        if event.text or event.logprobs:
            yield from self._say("reasoning" if event.channel == "think" else "message", event)
        if event.tool_call is not None:
            yield from self._call(event.tool_call)

    def end(self, finish: str | None) -> Iterator[Json]:
        """Nothing follows."""
        if not self._begun:  # an empty answer is a message, too
            yield from self._begin("message")
        yield from self._close("incomplete" if finish == "length" else "completed")

    @property
    def output(self) -> list[Json]:
        return [self._json(item, status) for item, status in self._done if item.id not in self._void]

    @property
    def thought(self) -> str:
        return "".join(item.text for item, _ in self._done if item.kind == "reasoning")

    def message(self) -> Message:
        """As a turn of what follows."""
        kept = [item for item, _ in self._done if item.id not in self._void]
        text = "".join(item.text for item in kept if item.kind == "message")
        calls = [ToolCall(i.call.id or "", i.call.name or "", i.text) for i in kept if i.call is not None]
        return Message("assistant", text, self.thought or None, tuple(calls))

    # ---- texts ----------------------------------------------------------------------------------------------------

    def _say(self, kind: str, event: Event) -> Iterator[Json]:
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        item = self._open
        assert item is not None
        item.pieces.append(event.text)
        item.logprobs += event.logprobs
        delta: Json = {"type": f"response.{_PART[kind]}.delta", **_at(item), "content_index": 0, "delta": event.text}
        yield delta | ({"logprobs": self._told(event.logprobs)} if kind == "message" else {})

    def _begin(self, kind: str, call: ToolCallDelta | None = None) -> Iterator[Json]:
        item = self._open = _Item(kind, f"{_PREFIX[kind]}_{self._base}{self._begun:02x}", self._begun, call)
        self._begun += 1
        yield {
            "type": "response.output_item.added", "output_index": item.place, "item": self._json(item, "in_progress"),
        }  # fmt: skip
        if kind in _PART:
            part = self._part(item)
            yield {"type": "response.content_part.added", **_at(item), "content_index": 0, "part": part}

    def _close(self, status: str) -> Iterator[Json]:
        item, self._open = self._open, None
        if item is None:
            return
        self._done.append((item, status))
        if item.kind in _PART:
            at = {**_at(item), "content_index": 0}
            logprobs = {"logprobs": self._told(item.logprobs)} if item.kind == "message" else {}
            yield {"type": f"response.{_PART[item.kind]}.done", **at, "text": item.text, **logprobs}
            yield {"type": "response.content_part.done", **at, "part": self._part(item)}
        elif item.call is not None and item.id not in self._void:
            done = {"name": item.call.name, "arguments": item.text}
            yield {"type": "response.function_call_arguments.done", **_at(item), **done}
        yield {"type": "response.output_item.done", "output_index": item.place, "item": self._json(item, status)}

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _call(self, piece: ToolCallDelta) -> Iterator[Json]:
        item = self._open
        if piece.void:
            yield from self._take_back(piece.index)
            return
        if item is None or item.call is None or item.call.index != piece.index:
            yield from self._close("completed")
            yield from self._begin("function_call", piece)
            item = self._open
        assert item is not None
        if piece.arguments:
            item.pieces.append(piece.arguments)
            yield {"type": "response.function_call_arguments.delta", **_at(item), "delta": piece.arguments}

    def _take_back(self, index: int) -> Iterator[Json]:
        """What a stream has told of it stays told, as incomplete; it is no item of the answer."""
        begun = [*(item for item, _ in self._done), *([self._open] if self._open is not None else [])]
        self._void += [item.id for item in begun if item.call is not None and item.call.index == index]
        if self._open is not None and self._open.id in self._void:
            yield from self._close("incomplete")

    # ---- JSON -----------------------------------------------------------------------------------------------------

    def _json(self, item: _Item, status: str) -> Json:
        head: Json = {"id": item.id, "type": item.kind, "status": status}
        if item.call is not None:
            return head | {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
        content = [] if status == "in_progress" else [self._part(item)]
        if item.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}

    def _part(self, item: _Item) -> Json:
        part: Json = {"type": _PART[item.kind], "text": item.text}
        if item.kind == "reasoning":
            return part
        return part | {"annotations": [], "logprobs": self._told(item.logprobs)}

    def _told(self, tokens: Sequence[Logprob]) -> list[Json]:
        return logprobs_of(tokens, self._token_bytes)


def _at(item: _Item) -> Json:
    return {"item_id": item.id, "output_index": item.place}
