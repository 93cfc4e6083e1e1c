"""The list of messages is the truth: what is sent, shown, undone and written to the session file is this list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minicpm_cli.errors import ContextOverflow
from minicpm_cli.types import Message

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message; `partial` when its generation was stopped half-way."""

    message: Message
    partial: bool = False


class Record(Protocol):
    """Where turns are written as they happen."""

    def append(self, turn: Turn) -> None: ...
    def rewrite(self, turns: Sequence[Turn]) -> None: ...


@dataclass(slots=True)
class Conversation:
    """Turns in order, the system prompt (if any) first. Every change goes to `record` at once."""

    turns: list[Turn] = field(default_factory=list)
    record: Record | None = None

    @property
    def messages(self) -> Messages:
        return tuple(turn.message for turn in self.turns)

    @property
    def system(self) -> str | None:
        first = self.turns[0].message if self.turns else None
        return first.content if first and first.role == "system" else None

    @property
    def questions(self) -> int:
        return sum(turn.message.role == "user" for turn in self.turns)

    @property
    def asked(self) -> Messages:
        """The messages up to the last question."""
        messages = self.messages
        return messages[: max((i + 1 for i, m in enumerate(messages) if m.role == "user"), default=0)]

    def add(self, message: Message, *, partial: bool = False) -> None:
        turn = Turn(message, partial)
        self.turns.append(turn)
        if self.record:
            self.record.append(turn)

    def set_system(self, text: str | None) -> None:
        rest = self.turns[1:] if self.system is not None else self.turns
        self.replace(([Turn(Message("system", text))] if text else []) + rest)

    def undo(self, count: int = 1) -> int:
        """Takes back the last `count` questions with their answers; returns how many there were to take."""
        starts = [i for i, turn in enumerate(self.turns) if turn.message.role == "user"]
        taken = starts[-count:] if count > 0 else []
        if taken:
            self.replace(self.turns[: taken[0]])
        return len(taken)

    def take_answer(self) -> bool:
        """Takes back the last answer, so that its question can be asked again; False when there is no question."""
        if not self.questions:
            return False
        last = max(i for i, turn in enumerate(self.turns) if turn.message.role == "user")
        if self.turns[last + 1 :]:
            self.replace(self.turns[: last + 1])
        return True

    def reset(self) -> None:
        """Only the system prompt stays."""
        self.replace(self.turns[:1] if self.system is not None else [])

    def replace(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        if self.record:
            self.record.rewrite(self.turns)


def fit(messages: Messages, count: Callable[[Messages], int], limit: int) -> tuple[Messages, int]:
    """The newest messages whose prompt has at most `limit` tokens, and how many old ones were left out.

    The system prompt stays; what is left out ends before a question. Raises ContextOverflow when the last question
    alone is too long.
    """
    system = messages[:1] if messages and messages[0].role == "system" else ()
    rest = messages[len(system) :]
    starts = [i for i, message in enumerate(rest) if message.role == "user"] or [0]
    for start in [0, *(i for i in starts if i > 0)]:
        kept = system + rest[start:]
        tokens = count(kept)
        if tokens <= limit:
            return kept, start
    raise ContextOverflow(tokens, 0, limit)
