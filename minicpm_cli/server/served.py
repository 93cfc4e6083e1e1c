"""What the server needs of a language model beyond what chat and batch ask of it."""

from __future__ import annotations

from typing import Protocol

from minicpm_cli.llm.info import LanguageModel, Occupancy


class Served(LanguageModel, Protocol):
    """All of it may be called from any thread, while `stream` runs in another."""

    def cancel(self, request_id: str) -> None:
        """Ends a request that `stream` has pulled before the next step; its last event says "cancelled"."""
        ...

    def plain_ids(self, text: str) -> list[int]:
        """The tokens of a text without a template and without the token that begins a prompt."""
        ...

    def token_bytes(self, ident: int) -> bytes: ...

    @property
    def occupancy(self) -> Occupancy:
        """Of this moment."""
        ...
