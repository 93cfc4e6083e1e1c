"""What the server needs of a language model beyond what chat and batch ask of it, and which part of that HTTP needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minicpm_cli.llm.info import LanguageModel, LLMInfo, Occupancy, Totals
from minicpm_cli.types import Request


class Texts(Protocol):
    """Texts to tokens and back: no weights are needed. All of it may be called from any thread."""

    def encoded(self, request: Request) -> Request: ...

    def prompt(self, request: Request) -> list[int]: ...

    def plain_ids(self, text: str) -> list[int]:
        """The tokens of a text without a template and without the token that begins a prompt."""
        ...

    def token_bytes(self, ident: int) -> bytes: ...


class Fronted(Texts, Protocol):
    """A model as HTTP sees it. The numbers are of this moment, or of a moment ago."""

    @property
    def info(self) -> LLMInfo: ...

    @property
    def totals(self) -> Totals: ...

    @property
    def occupancy(self) -> Occupancy: ...

    @property
    def gpu_peak_bytes(self) -> int | None: ...


class Served(LanguageModel, Fronted, Protocol):
    """The whole of it. All of it may be called from any thread, while `stream` runs in another."""

    @property
    def open_texts(self) -> Callable[[], Texts] | None:
        """Makes the same texts and tokens in another process; None where it cannot be sent there."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request that `stream` has pulled before the next step; its last event says "cancelled"."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_body` bytes of a request, `max_queue` requests in line, `patience` seconds to finish them at the end."""

    max_body: int = 16 * 2**20
    max_queue: int = 1024
    patience: float = 300.0
