"""What the rest of the program knows of a loaded model: its interface and its facts. No torch here."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minicpm_cli.types import Event, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class LLMInfo:
    """Facts about a loaded model: sizes in bytes, `context` and `cache_tokens` in tokens, times in seconds.

    `scheme` says how the weights lie in memory (bf16, Q4_1, gptq w4 g128 sym, ...), `template` where the chat template
    comes from; `adapter` is a hash of a LoRA adapter's files; `notes` are things to tell the user once, `details` only
    to one who asks for numbers.
    """

    name: str
    context: int
    scheme: str = "bf16"
    device: str = "cpu"
    architecture: str = ""
    revision: str | None = None
    parameters: int = 0
    max_seqs: int = 1
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_tokens: int = 0
    load_seconds: float = 0.0
    template: str = "none"
    template_source: str = ""
    adapter: str = ""
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def has_think_switch(self) -> bool:
        """Whether the template asks if the model is to think; a template that is not known here may."""
        return not self.template_source or "enable_thinking" in self.template_source


@dataclass(frozen=True, slots=True)
class Speculated:
    """Tokens that were expected to repeat what was said, in so many steps, and those of them that came."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def mean_accepted(self) -> float:
        return self.accepted / self.drafts if self.drafts else 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens since the model was loaded, those of requests that still run among them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Requests in the engine, pages of its cache (held by requests; idle: known and free for others), and how many
    requests had to give theirs back.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_held: int = 0
    pages_idle: int = 0
    preemptions: int = 0


class Prompts(Protocol):
    """What turns a request into the tokens that the model reads; it needs no weights."""

    def prompt(self, request: Request) -> list[int]:
        """The ids that `request` starts from. Raises RequestError or TemplateError."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        """Each id with its text, for people to read."""
        ...


class LanguageModel(Prompts, Protocol):
    """Text in, events out. `defaults` are the sampling values for whatever a user leaves unset."""

    @property
    def defaults(self) -> SamplingParams: ...

    @property
    def info(self) -> LLMInfo: ...

    @property
    def speculated(self) -> Speculated:
        """Of all requests so far."""
        ...

    @property
    def totals(self) -> Totals:
        """Cheap enough to be asked ten times a second, from any thread."""
        ...

    @property
    def gpu_peak_bytes(self) -> int | None:
        """The most that torch has held of the GPU's memory; None on a CPU."""
        ...

    def token_bytes(self, ident: int) -> bytes:
        """What a token writes; it may be a part of a character."""
        ...

    def encoded(self, request: Request) -> Request:
        """`request` with its tokens, which `stream` need not make any more. From any thread. Raises as `prompt`."""
        ...

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        """Events of all requests, each request's in order. Closing the generator aborts what is still running.

        `requests` is pulled only while there is room; None means that there is nothing right now.
        """
        ...

    def forget(self) -> None:
        """The next prompt is read as a whole: nothing of it is in the prefix cache any more."""
        ...

    def close(self) -> None: ...
