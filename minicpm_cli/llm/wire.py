"""HTTP to a server that speaks as OpenAI does: what is sent, what comes back, and what a refusal means."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from minicpm_cli.errors import MinicpmError, ModelError, RequestError, UsageError
from minicpm_cli.text.tools import as_json, gathered
from minicpm_cli.types import Event, FinishReason, Message, Request, SamplingParams, Timings, ToolCallDelta, Usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CONNECT = 10.0  # seconds
_BUSY = (429, 503)
_SENT = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "seed", "regex", "think_budget", "ignore_eos", "min_tokens"),
)
_FINISHES: Mapping[str, FinishReason] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "malformed_tool_call": "malformed_tool_call",
}


class Gone(ModelError):
    """No server, or not any more."""


class Refusal(Exception):
    """The server's answer to a request that it does not take."""

    def __init__(self, status: int, message: str, code: str | None, seconds: float) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.seconds = status, message, code, seconds

    @property
    def busy(self) -> bool:
        return self.status in _BUSY

    def error(self) -> MinicpmError:
        """What that is to whoever asked. 4xx is the request's own fault, but for keys and paths."""
        if self.code == "context_length_exceeded":
            return RequestError("context_overflow", self.message)
        if self.status in (400, 413, 422):
            return RequestError("bad_parameter", self.message)
        return Gone(f"the server says: {self.message} (HTTP {self.status})")


class Lines:
    """The lines of an answer that is still coming; `cut` may come from another thread."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._response)

    def cut(self) -> None:
        if (sock := self._connection.sock) is not None:
            sock.shutdown(socket.SHUT_RDWR)


class Wire:
    """A server by its address, with or without the /v1 of OpenAI's clients."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--server is {url!r}; it must be an address such as http://127.0.0.1:8000")
        self.url, self._host, self._secure = url, parts.netloc.rpartition("@")[2], parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> dict[str, Any]:
        with self._call("GET", path, None) as (_, response):
            return self._object(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Refusal, and Gone where nobody answers."""
        with self._call("POST", path, body) as (_, response):
            return self._object(response.read())

    @contextmanager
    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Lines]:
        """Raises Refusal, and Gone where nobody answers."""
        with self._call("POST", path, body) as (connection, response):
            yield Lines(connection, response)

    def raw_post(self, path: str) -> tuple[tuple[str, int], bytes]:
        """Where to connect, and the head of a POST without the length of its body. Raises UsageError for https."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if self._secure or not parts.hostname:
            raise UsageError(f"--server is {self.url!r}; what is measured must speak plain http")
        fields = {"Host": self._host, **self._headers}
        lines = [f"POST {self._base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return (parts.hostname, parts.port or http.client.HTTP_PORT), ("\r\n".join(lines) + "\r\n").encode()

    @contextmanager
    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=_CONNECT)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a queue may take its time
            raw = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, raw, self._headers)
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise _refusal(response)
                yield connection, response
        except (OSError, http.client.HTTPException) as error:
            raise Gone(
                f"no server answers at {self.url}: {str(error) or type(error).__name__}. Is it running (minicpm serve)?"
            ) from None
        finally:
            connection.close()

    def _object(self, raw: bytes) -> dict[str, Any]:
        with suppress(ValueError):
            if isinstance(found := json.loads(raw), dict):
                return found
        raise Gone(f"{self.url} is no server of this kind: its answer is no JSON object")


def _refusal(response: http.client.HTTPResponse) -> Refusal:
    raw = response.read().decode("utf-8", "replace")
    message, code = raw[:200] or response.reason, None
    with suppress(ValueError, TypeError, KeyError):
        error = json.loads(raw)["error"]
        message, code = str(error["message"]), error.get("code")
    after = response.getheader("Retry-After") or ""
    return Refusal(response.status, message, code, float(after) if after.isdigit() else 1.0)


# ---- what is sent -------------------------------------------------------------------------------------------------


def body_of(request: Request, model: str, given: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The path and the body of a streamed request; of its sampling values those in `given`, and those that differ from
    the plain ones. Raises RequestError for what cannot be sent.
    """
    if request.params.logprobs is not None:
        raise RequestError("bad_parameter", "--logprobs cannot be asked of a server: it does not say its tokens' ids")
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    plain = SamplingParams()
    for name in _SENT:
        value = getattr(request.params, name)
        if value is not None and (name in given or value != getattr(plain, name)):
            body[name] = value
    body |= _constraints(request.params) | _tools(request)
    if isinstance(request.messages, str):
        return COMPLETIONS, body | {"prompt": request.messages + request.prefill}
    messages = [_message(message) for message in request.messages]
    if request.prefill:  # as vLLM and minicpm serve have it; others refuse it by name
        messages.append({"role": "assistant", "content": request.prefill})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return CHAT, body | {"messages": messages}


def _constraints(params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {"stop": list(params.stop)} if params.stop else {}
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": params.think}
    if params.schema is not None:
        schema = {"name": "answer", "schema": json.loads(params.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _tools(request: Request) -> dict[str, Any]:
    if not request.tools:
        return {}
    choice = request.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    sent = {
        "tools": [tool.definition for tool in request.tools],
        "tool_choice": choice.mode if choice.name is None else named,
    }
    return sent if choice.parallel else sent | {"parallel_tool_calls": False}


def _message(message: Message) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = as_json(message.tool_calls)
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    return sent


# ---- what comes back ----------------------------------------------------------------------------------------------


def events_of(request: Request, lines: Iterator[bytes] | Lines, begun: float) -> Iterator[Event]:
    """The events of a stream. Raises Gone where it ends before its time, RequestError for an error in it."""
    first: float | None = None
    finish: FinishReason | None = None
    usage, answer = Usage(0, 0), [request.prefill]
    made: list[ToolCallDelta] = []
    for chunk in _chunks(lines):
        if "error" in chunk:
            raise RequestError("internal", f"the server says: {chunk['error'].get('message', chunk['error'])}")
        usage = _usage(chunk.get("usage")) or usage
        for choice in chunk.get("choices") or ():
            for event in _pieces(request.id, choice):
                first = first or time.monotonic()
                if event.tool_call is not None:
                    made.append(event.tool_call)
                elif event.channel == "answer":
                    answer.append(event.text)
                yield event
            if (why := choice.get("finish_reason")) is not None:
                finish = _FINISHES.get(why, "stop")
    if finish is None:
        raise Gone("the server ended before its answer did")
    yield from (Event(request.id, tool_call=piece) for piece in _given_up(made))
    now = time.monotonic()
    timings = Timings(0.0, (first or now) - begun, now - begun)
    yield Event(
        request.id,
        finish=finish,
        usage=usage,
        timings=timings,
        seed=request.params.seed,
        incomplete=_incomplete(request.params, finish, "".join(answer)),
    )


def _incomplete(params: SamplingParams, finish: FinishReason, answer: str) -> bool:
    """Cut, or of a server that took no notice of the schema. Which white space it allows is its own choice."""
    if params.schema is None and params.regex is None:
        return False
    if finish == "length" or params.schema is None:
        return finish == "length"
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return True
    return False


def _chunks(lines: Iterator[bytes] | Lines) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:") and data:
            yield json.loads(data)


def _pieces(ident: str, choice: Mapping[str, Any]) -> Iterator[Event]:
    delta = choice.get("delta") or {}
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Event(ident, thought, "think")
    if text := delta.get("content") or choice.get("text"):
        yield Event(ident, text)
    for piece in delta.get("tool_calls") or ():
        yield Event(ident, tool_call=_call_delta(piece))


def _call_delta(piece: Mapping[str, Any]) -> ToolCallDelta:
    function = piece.get("function") or {}
    index, arguments = piece.get("index") or 0, function.get("arguments") or ""
    return ToolCallDelta(index, arguments, piece.get("id"), function.get("name"))


def _given_up(made: Iterable[ToolCallDelta]) -> Iterator[ToolCallDelta]:
    """Calls whose arguments never became the JSON object that they began as: their text came as content, too."""
    pieces = list(made)
    for index in sorted({piece.index for piece in pieces}):
        (call,) = gathered(piece for piece in pieces if piece.index == index)
        try:
            whole = isinstance(json.loads(call.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            yield ToolCallDelta(index, void=True)


def _usage(raw: Any) -> Usage | None:
    if not isinstance(raw, dict):
        return None
    cached = (raw.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(raw.get("prompt_tokens", 0), raw.get("completion_tokens", 0), cached)
