"""What tests of a conversation need: what was said and kept, and a person whose lines are known."""

from __future__ import annotations

import io
from collections.abc import Callable

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Turn
from minicpm_cli.chat.sessions import Sessions

Make = Callable[..., Chat]
Editor = Callable[..., None]


def contents(chat: Chat) -> list[str]:
    return [m.content for m in chat.conversation.messages]


def stored(chat: Chat) -> list[Turn]:
    """The turns of the session file."""
    return Sessions(chat.sessions.folder).open(chat.name).turns


def told(chat: Chat) -> str:
    """What was said on stderr since the last call."""
    err = chat.terminal.err
    assert isinstance(err, io.StringIO)
    text = err.getvalue()
    err.seek(0)
    err.truncate()
    return text


class Lines:
    """Lines of a person; an exception in the list is raised in its place. `drafts` are what they found on the line."""

    typed = True

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)
        self.drafts: list[str] = []

    def read(self, draft: str = "") -> str:
        self.drafts.append(draft)
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line
