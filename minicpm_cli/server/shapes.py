"""The JSON of answers, in the shapes of OpenAI's two calls: whole ones, and pieces of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minicpm_cli.text.tools import as_json, gathered
from minicpm_cli.types import Event, Logprob, ToolCallDelta, Usage

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
_IMPOSSIBLE = -9999.0  # what OpenAI writes for a probability of 0, which has no logarithm


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of an answer repeats."""

    id: str
    created: int
    model: str

    def around(self, kind: str, choices: list[Json], **more: Any) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


@dataclass(slots=True)
class Choice:
    """What one request has answered so far."""

    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None

    def add(self, event: Event) -> None:
        (self.thought if event.channel == "think" else self.text).append(event.text)
        self.logprobs += event.logprobs
        if event.tool_call is not None:
            self.calls.append(event.tool_call)
        if event.finish is not None:
            self.finish, self.usage = event.finish, event.usage


class Shape(Protocol):
    """How one of the two calls is answered."""

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json: ...

    def begin(self, index: int) -> Json | None:
        """The chunk that opens a choice."""
        ...

    def piece(self, index: int, event: Event) -> Json | None:
        """The chunk of an event that does not end a choice, or of what comes with its end."""
        ...

    def end(self, index: int, finish: str) -> Json: ...

    def last(self, usage: Json) -> Json:
        """The chunk behind all choices, where the client wants to know the counts."""
        ...


def usage_of(prompts: Iterable[Usage], answers: Iterable[Usage]) -> Json:
    """A prompt counts once, however many answers it has."""
    read, written = list(prompts), list(answers)
    prompt, completion = sum(u.prompt_tokens for u in read), sum(u.completion_tokens for u in written)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in read)},
    }


@dataclass(frozen=True, slots=True)
class ChatShape:
    """/v1/chat/completions."""

    head: Head
    token_bytes: TokenBytes
    logprobs: bool = False

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        return self.head.around("chat.completion", [self._whole(i, c) for i, c in enumerate(choices)], usage=usage)

    def _whole(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        if choice.thought:
            message["reasoning_content"] = "".join(choice.thought)
        if calls := gathered(choice.calls):
            message["tool_calls"] = as_json(calls)
            message["content"] = message["content"] or None
        logprobs = self._logprobs(choice.logprobs) if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def begin(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, event: Event) -> Json | None:
        delta: Json = {}
        if event.text:
            delta["reasoning_content" if event.channel == "think" else "content"] = event.text
        if event.tool_call is not None and not event.tool_call.void:  # what was said cannot be taken back
            delta["tool_calls"] = [_call_delta(event.tool_call)]
        if not delta and not event.logprobs:
            return None
        return self._chunk(index, delta, self._logprobs(event.logprobs) if event.logprobs else None)

    def end(self, index: int, finish: str) -> Json:
        return self._chunk(index, {}, finish=finish)

    def last(self, usage: Json) -> Json:
        return self.head.around("chat.completion.chunk", [], usage=usage)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.head.around("chat.completion.chunk", [choice])

    def _logprobs(self, tokens: Sequence[Logprob]) -> Json:
        return {"content": logprobs_of(tokens, self.token_bytes), "refusal": None}


def logprobs_of(tokens: Iterable[Logprob], token_bytes: TokenBytes) -> list[Json]:
    """As all calls but completions tell them."""

    def entry(ident: int, value: float) -> Json:
        raw = token_bytes(ident)
        return {"token": _shown(raw), "logprob": _finite(value), "bytes": list(raw)}

    return [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(*each) for each in token.top]} for token in tokens
    ]


def _call_delta(piece: ToolCallDelta) -> Json:
    function: Json = {"arguments": piece.arguments}
    if piece.name is not None:
        function["name"] = piece.name
    delta: Json = {"index": piece.index, "function": function}
    return delta | ({"id": piece.id, "type": "function"} if piece.id is not None else {})


@dataclass(slots=True)
class CompletionShape:
    """/v1/completions. `echoed` are the prompts, by choice, where the client wants them before its answers."""

    head: Head
    token_bytes: TokenBytes
    logprobs: bool = False
    echoed: Sequence[str] = ()
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        return self.head.around("text_completion", [self._whole(i, c) for i, c in enumerate(choices)], usage=usage)

    def _whole(self, index: int, choice: Choice) -> Json:
        text = self._echo(index) + "".join(choice.thought) + "".join(choice.text)
        logprobs = self._logprobs(index, choice.logprobs) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _echo(self, index: int) -> str:
        return self.echoed[index] if self.echoed else ""

    def begin(self, index: int) -> Json | None:
        return self._chunk(index, self._echo(index)) if self.echoed else None

    def piece(self, index: int, event: Event) -> Json | None:
        if not event.text and not event.logprobs:
            return None
        return self._chunk(index, event.text, self._logprobs(index, event.logprobs) if event.logprobs else None)

    def end(self, index: int, finish: str) -> Json:
        return self._chunk(index, "", finish=finish)

    def last(self, usage: Json) -> Json:
        return self.head.around("text_completion", [], usage=usage)

    def _chunk(self, index: int, text: str, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self.head.around("text_completion", [choice])

    def _logprobs(self, index: int, tokens: Sequence[Logprob]) -> Json:
        shown = [_shown(self.token_bytes(token.token)) for token in tokens]
        offsets, offset = [], self._offsets.get(index, len(self._echo(index)))
        for text in shown:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": shown,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Logprob) -> dict[str, float]:
        return {_shown(self.token_bytes(ident)): _finite(value) for ident, value in token.top}


def _shown(raw: bytes) -> str:
    """A token's text; part of a character as \\xNN."""
    return raw.decode("utf-8", "backslashreplace")


def _finite(value: float) -> float:
    return max(value, _IMPOSSIBLE)
