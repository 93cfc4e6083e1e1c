"""The line below the prompt: model, scheme, how much of the context is used, speed, session."""

from __future__ import annotations

from typing import Any

from prompt_toolkit.application import get_app
from prompt_toolkit.utils import get_cwidth

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.terminal import neutral
from minicpm_cli.errors import MinicpmError


class Toolbar:
    """What is said is counted once, not with every key."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._counted: tuple[Any, int] | None = None

    def __call__(self) -> str:
        return fitting(self.parts(), get_app().output.get_size().columns)

    def parts(self) -> list[str]:
        """The most important first."""
        chat, info = self._chat, self._chat.llm.info
        used = self._used()
        parts = [f"{info.name} {info.scheme}", f"{used:,} of {info.context:,} tokens ({used / info.context:.0%})"]
        last = chat.last
        if last and last.usage and last.timings and last.usage.completion_tokens > 1:
            parts.append(f"{last.timings.decode_rate(last.usage):.1f} tok/s")
        if chat.attached:
            parts.append(f"{len(chat.attached)} file{'' if len(chat.attached) == 1 else 's'} attached")
        return [*parts, chat.name]

    def _used(self) -> int:
        chat = self._chat
        key = (chat.conversation.messages, chat.params.think)
        if self._counted is None or self._counted[0] != key:
            try:
                used = chat.llm.info.context - chat.room()
            except MinicpmError:  # said when something is asked
                used = 0
            self._counted = (key, used)
        return self._counted[1]


def fitting(parts: list[str], columns: int) -> str:
    """As many parts as a row of `columns` holds; the first is cut when not even it fits."""
    row = ""
    for part in parts:
        longer = f"{row} · {neutral(part)}" if row else f" {neutral(part)}"
        if get_cwidth(longer) > columns:
            break
        row = longer
    row = row or neutral(parts[0])
    while get_cwidth(row) > columns:
        row = row[:-1]
    return row
