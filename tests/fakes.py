"""A language model without weights: answers are a function of the request, so that tests can state them exactly.

It keeps LLM's promises: requests are pulled lazily, a failing request is an event with an error, closing the stream
aborts what runs. Tokens are words here (a word and the spaces before it).
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from minicpm_cli.errors import ContextOverflow, MinicpmError
from minicpm_cli.llm.info import LLMInfo, Occupancy, Speculated, Totals
from minicpm_cli.types import Event, FinishReason, Message, Request, SamplingParams, Timings, Usage

_WORD = re.compile(r"\s*\S+|\s+")


def words(text: str) -> list[str]:
    """The tokens of a text."""
    return _WORD.findall(text)


def echo(request: Request) -> str:
    """The default answer: what was said last."""
    last = request.messages if isinstance(request.messages, str) else request.messages[-1].content
    return f"You said: {last}"


def rendered(request: Request) -> str:
    """The prompt's text: each role and what it said."""
    asked = request.messages
    turns = (Message("user", asked),) if isinstance(asked, str) else asked
    return " ".join([*(f"{turn.role} {turn.content}" for turn in turns), request.prefill]).rstrip()


@dataclass
class FakeLLM:
    """`answer` and `thought` make the text of a request; `fail` returns the error it is to end in, or None.

    `delay` seconds pass before each token; `seats` requests run at once, taking turns. `seen` are the requests in the
    order they were pulled, `aborted` the ids that were running when a stream was closed.
    """

    answer: Callable[[Request], str] = echo
    thought: Callable[[Request], str] = lambda request: ""
    fail: Callable[[Request], MinicpmError | None] = lambda request: None
    delay: float = 0.0
    seats: int = 4
    context: int = 4096
    defaults: SamplingParams = field(default_factory=SamplingParams)
    notes: tuple[str, ...] = ()
    template_source: str = ""
    seen: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: bool = False
    speculated: Speculated = field(default_factory=Speculated)
    totals: Totals = field(default_factory=Totals)
    gpu_peak_bytes: int | None = None
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    steps: int = 0
    open_texts: Callable[[], object] | None = None

    @property
    def info(self) -> LLMInfo:
        facts = LLMInfo("fake", self.context, device="cpu", max_seqs=self.seats, load_seconds=0.25, notes=self.notes)
        return replace(facts, template_source=self.template_source)

    def encoded(self, request: Request) -> Request:
        """Equal words are equal tokens, so that prompts share prefixes as their texts do."""
        return replace(request, ids=[zlib.crc32(word.encode()) for word in words(rendered(request))])

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(running=self.running)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def plain_ids(self, text: str) -> list[int]:
        return list(range(len(words(text))))

    def token_bytes(self, ident: int) -> bytes:
        return f"<{ident}>".encode()

    def prompt(self, request: Request) -> list[int]:
        return list(range(len(words(rendered(request)))))

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        return [(ident, f"<{ident}>") for ident in ids]

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        source, running, more = iter(requests), dict[str, Iterator[Event]](), True
        try:
            while more or running:
                while more and len(running) < self.seats:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        break
                    if request is None:
                        break
                    self.seen.append(request)
                    running[request.id] = self._events(request)
                for ident in [ident for ident in self.cancelled if ident in running]:
                    del running[ident]
                    yield Event(ident, finish="cancelled", usage=Usage(0, 0), timings=Timings())
                self.running = len(running)
                for ident, events in list(running.items()):
                    event = next(events)
                    if event.finish is not None:
                        del running[ident]
                    self._count(event)
                    yield event
                self.running = len(running)
        finally:
            self.running = 0
            self.aborted += running
            if hasattr(source, "close"):
                source.close()

    def forget(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _count(self, event: Event) -> None:
        prompt = event.usage.prompt_tokens if event.usage else 0
        totals, words_ = self.totals, bool(event.text)
        self.totals = replace(
            totals, prompt_tokens=totals.prompt_tokens + prompt, generated_tokens=totals.generated_tokens + words_
        )

    def _events(self, request: Request) -> Iterator[Event]:
        error = self.fail(request) or self._overflow(request)
        if error is not None:
            yield Event(request.id, finish="error", error=error)
            return
        thought, budget = words(self.thought(request)), request.params.think_budget
        pieces = [("think", word) for word in thought[:budget]]
        pieces += [("answer", word) for word in words(self.answer(request))]
        limit = request.params.max_tokens or self.context
        text = ""
        for channel, word in pieces[:limit]:
            time.sleep(self.delay)
            text += word if channel == "answer" else ""
            stop = next((s for s in request.params.stop if s in text), None)
            if stop is not None:
                break
            yield Event(request.id, word, "think" if channel == "think" else "answer")
        count = min(len(pieces), limit)
        finish: FinishReason = "length" if len(pieces) > limit else "stop"
        usage = Usage(len(self.prompt(request)), count, 0)
        seed = request.params.seed if request.params.seed is not None else 1234
        ended = budget is not None and len(thought) > budget > 0
        times = Timings(0.0, 0.5, 1.0)
        yield Event(request.id, finish=finish, usage=usage, timings=times, seed=seed, thought_out=ended)

    def _overflow(self, request: Request) -> MinicpmError | None:
        prompt, wanted = len(self.prompt(request)), request.params.max_tokens or 1
        return ContextOverflow(prompt, wanted, self.context) if prompt + wanted > self.context else None
