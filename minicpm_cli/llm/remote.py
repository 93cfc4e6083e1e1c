"""A model that another program has loaded and serves as OpenAI does: asked like one's own, so that scripts share it."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from minicpm_cli.errors import ModelNotFound, RequestError
from minicpm_cli.llm.info import LLMInfo, Speculated, Totals
from minicpm_cli.llm.wire import Gone, Lines, Refusal, Wire, body_of, events_of
from minicpm_cli.types import Event, Request, SamplingParams

SEATS = 16  # requests on their way at once, where a server does not say how many it takes
_UNKNOWN_CONTEXT = 2**20  # tokens, of a server that does not say it: it will refuse what is too long itself
_CHARACTERS = 3  # of a token, where a server does not count
_RAW_TOKENS = 1024  # of an answer to a raw prompt, by a server that does not say its context
SEED_BITS = 53  # a JSON number holds it exactly
_LOOK = 0.05  # seconds between two looks into the source while answers are awaited
_PATIENCE = 600.0  # seconds in which a busy server may refuse a request again and again


@dataclass(frozen=True, slots=True)
class _Ended:
    """The thread of a request is done; `error` ends all of them."""

    error: Exception | None = None


class RemoteLLM:
    """See `minicpm_cli.llm.info.LanguageModel`. Only what the user set is sent: the rest is the server's choice."""

    speculated = Speculated()
    gpu_peak_bytes = None

    def __init__(self, wire: Wire, info: LLMInfo, given: Mapping[str, Any]) -> None:
        self._wire, self.info, self._given = wire, info, frozenset(given)
        self.defaults = SamplingParams()
        self.totals = Totals()
        self._counts = True  # whether the server has /tokenize

    @classmethod
    def open(cls, url: str, key: str | None, model: str | None, given: Mapping[str, Any]) -> RemoteLLM:
        """`model` None: the first one that the server has. Raises ModelError and UsageError."""
        wire = Wire(url, key)
        try:
            data = wire.get("/v1/models").get("data") or ()
        except Refusal as refusal:
            raise refusal.error() from None
        served = {str(entry["id"]): entry for entry in data if isinstance(entry, dict) and "id" in entry}
        if not served or (model is not None and model not in served):
            known = ", ".join(served) or "none"
            raise ModelNotFound(f"the server at {url} has no model {model or 'at all'}. It has: {known}.")
        name = model or next(iter(served))
        context = served[name].get("max_model_len")
        size = context if isinstance(context, int) else _UNKNOWN_CONTEXT
        return cls(wire, LLMInfo(name, size, scheme="served", device=url, max_seqs=SEATS), given)

    def encoded(self, request: Request) -> Request:
        """The server makes the tokens."""
        return request

    def prompt(self, request: Request) -> list[int]:
        """Where the server does not count, ids that stand for nothing, about as many as there will be."""
        if self._counts:
            try:
                return [int(ident) for ident in self._tokenize(request)["tokens"]]
            except (Refusal, KeyError, TypeError, ValueError):
                self._counts = False
        asked = request.messages
        texts = [asked] if isinstance(asked, str) else [message.content for message in asked]
        return [0] * (sum(map(len, texts)) // _CHARACTERS + 1)

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        try:
            return [(i, str(self._wire.post("/detokenize", {"tokens": [i]})["prompt"])) for i in ids]
        except (Refusal, KeyError):
            return [(i, "") for i in ids]

    def token_bytes(self, ident: int) -> bytes:
        return self.pieces([ident])[0][1].encode()

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        """A thread for each request on its way."""
        source, events, running, calls = iter(requests), queue.SimpleQueue[Event | _Ended](), 0, _Calls()
        more = True
        try:
            while more or running:
                while more and running < SEATS:
                    request = next(source, calls)
                    more = request is not calls
                    if not isinstance(request, Request):
                        break
                    self._start(request, events, calls)
                    running += 1
                for event in _arrived(events, wait=running > 0):
                    if isinstance(event, _Ended):
                        running -= 1
                        if event.error is not None:
                            raise event.error
                    else:
                        self._note(event)
                        yield event
        finally:
            calls.close()

    def forget(self) -> None:
        """The cache is the server's, and others use it, too."""

    def close(self) -> None:
        pass

    # ---- one request ----------------------------------------------------------------------------------------------

    def _start(self, request: Request, events: queue.SimpleQueue[Event | _Ended], calls: _Calls) -> None:
        def work() -> None:
            error: Exception | None = None
            try:
                for event in self._asked(request, calls):
                    events.put(event)
            except RequestError as wrong:
                events.put(Event(request.id, finish="error", error=wrong))
            except Exception as gone:  # noqa: BLE001 - for the thread that takes the events
                error = gone
            events.put(_Ended(error))

        threading.Thread(target=work, name="asking", daemon=True).start()

    def _asked(self, request: Request, calls: _Calls) -> Iterator[Event]:
        request = self._whole(request)
        path, body = body_of(request, self.info.name, self._given)
        begun = time.monotonic()
        while True:
            try:
                with self._wire.stream(path, body) as lines, calls.open(lines):
                    yield from events_of(request, lines, begun)
                return
            except Refusal as refusal:
                if not refusal.busy or time.monotonic() - begun > _PATIENCE or calls.closed.wait(refusal.seconds):
                    raise refusal.error() from None

    def _whole(self, request: Request) -> Request:
        """With a seed, so that it can be told and the answer be had again; a raw prompt with a limit, since the usual
        one of 16 tokens is not what is meant.
        """
        params = request.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        if params.max_tokens is None and isinstance(request.messages, str):
            room = self.info.context - len(self.prompt(request))
            limit = _RAW_TOKENS if self.info.context == _UNKNOWN_CONTEXT else room
            params = replace(params, max_tokens=max(1, min(room, limit)))
        return replace(request, params=params)

    def _tokenize(self, request: Request) -> dict[str, Any]:
        _, body = body_of(replace(request, params=SamplingParams()), self.info.name, frozenset())
        asked: dict[str, Any] = {name: body[name] for name in ("prompt", "messages", "tools") if name in body}
        return self._wire.post("/tokenize", asked)

    def _note(self, event: Event) -> None:
        if event.usage is not None:
            self.totals = Totals(
                self.totals.prompt_tokens + event.usage.prompt_tokens,
                self.totals.cached_tokens + event.usage.cached_tokens,
                self.totals.generated_tokens + event.usage.completion_tokens,
            )


class _Calls:
    """The connections of a stream, so that its end closes them: a server stops for a client that has gone."""

    def __init__(self) -> None:
        self._open: set[Lines] = set()
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def open(self, lines: Lines) -> _Held:
        with self._lock:
            if self.closed.is_set():
                raise Gone("nobody wants the answer any more")
            self._open.add(lines)
        return _Held(self, lines)

    def drop(self, lines: Lines) -> None:
        with self._lock:
            self._open.discard(lines)

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            for lines in self._open:
                with suppress(OSError):
                    lines.cut()


@dataclass(frozen=True, slots=True)
class _Held:
    calls: _Calls
    lines: Lines

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.calls.drop(self.lines)


def _arrived(events: queue.SimpleQueue[Event | _Ended], *, wait: bool) -> Iterator[Event | _Ended]:
    with suppress(queue.Empty):
        yield events.get(timeout=_LOOK) if wait else events.get_nowait()
        while True:
            yield events.get_nowait()
