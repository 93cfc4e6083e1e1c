"""Answers as output rows: one line each, in the format of the line that asked (simple or OpenAI's)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minicpm_cli.batch.keys import key_hash
from minicpm_cli.batch.logprobs import TokenTexts
from minicpm_cli.batch.records import Row, RowError
from minicpm_cli.text.tools import as_json, gathered
from minicpm_cli.types import Event, FinishReason, Logprob, ToolCallDelta, Usage

# What str.splitlines() of a careless reader would split on, and what UTF-8 cannot hold.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")

_Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """The events of one row, gathered. `texts` are those of the model's tokens."""

    text: list[str] = field(default_factory=list)
    think: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage = Usage(0, 0)  # noqa: RUF009 (frozen)
    pieces: list[ToolCallDelta] = field(default_factory=list)
    texts: TokenTexts = field(default_factory=TokenTexts)

    def add(self, event: Event) -> None:
        if event.text:
            (self.think if event.channel == "think" else self.text).append(event.text)
        if event.tool_call is not None:
            self.pieces.append(event.tool_call)
        self.logprobs.extend(event.logprobs)
        self.finish = event.finish or self.finish
        self.usage = event.usage or self.usage


def encode(row: Mapping[str, Any], extra: str | None = None) -> bytes:
    """One line of UTF-8 with its newline. `extra` is JSON text, put in under "input"."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    if extra is not None:
        text = f'{text[:-1]}, "input": {extra}}}'
    return (_ESCAPED.sub(lambda m: f"\\u{ord(m[0]):04x}", text) + "\n").encode("utf-8")


def answer_row(row: Row, answer: Answer, model: str, seed: int) -> bytes:
    body = _simple if row.kind == "simple" else _openai
    return encode(body(row, answer, model, seed), row.extra)


def error_row(row: Row) -> bytes:
    error = row.error or RowError("internal", "unknown error")
    said = {"code": error.code, "message": error.message}
    if row.kind == "simple":
        return encode({"id": row.id, "line": row.line, "error": said}, row.extra)
    status = 500 if error.code == "internal" else 400
    body = {"error": said | {"type": "server_error" if status == 500 else "invalid_request_error"}}
    return encode(_envelope(row, status, body) | {"error": said | {"line": row.line}}, row.extra)


def _simple(row: Row, answer: Answer, model: str, seed: int) -> _Json:
    usage = answer.usage
    out: _Json = {"id": row.id, "text": "".join(answer.text)}
    if answer.think:
        out["think"] = "".join(answer.think)
    if calls := gathered(answer.pieces):
        out["tool_calls"] = as_json(calls)
    out["finish_reason"] = answer.finish
    out["seed"] = seed
    out["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    if row.given.get("logprobs") is not None or answer.logprobs:
        out["logprobs"] = answer.texts.simple(answer.logprobs)
    return out


def _openai(row: Row, answer: Answer, model: str, seed: int) -> _Json:
    chat = row.kind == "chat"
    usage = answer.usage
    body: _Json = {
        "id": _name("chatcmpl" if chat else "cmpl", row),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_chat_choice(answer) if chat else _text_choice(answer)],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "seed": seed,
    }
    return _envelope(row, 200, body) | {"error": None}


def _envelope(row: Row, status: int, body: _Json) -> _Json:
    response = {"status_code": status, "request_id": _name("req", row), "body": body}
    return {"id": _name("batch_req", row), "custom_id": row.id, "response": response}


def _name(kind: str, row: Row) -> str:
    return f"{kind}_{key_hash(row.key):016x}"


def _chat_choice(answer: Answer) -> _Json:
    text = "".join(answer.text)
    calls = gathered(answer.pieces)
    message: _Json = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = as_json(calls)
    if answer.think:
        message["reasoning_content"] = "".join(answer.think)
    logprobs = answer.texts.chat(answer.logprobs) if answer.logprobs else None
    return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}


def _text_choice(answer: Answer) -> _Json:
    """A raw prompt's thinking, if the model thinks unasked, is part of its text."""
    text = "".join(answer.think) + "".join(answer.text)
    logprobs = answer.texts.completion(answer.logprobs) if answer.logprobs else None
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": answer.finish}
