"""The list of messages is the truth: what is sent, shown, undone and written to the session file is this list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from minicpm_cli.chat.made import Made
from minicpm_cli.types import Message

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message; `partial` when its generation was stopped half-way, `edited` when the user wrote it anew.

    `made` tells how an answer was made, where that is known; `time` is in seconds since 1970.
    """

    message: Message
    partial: bool = False
    made: Made | None = None
    edited: bool = False
    time: int = field(default_factory=lambda: int(time.time()), compare=False)


class Record(Protocol):
    """Where turns are written as they happen."""

    def append(self, turn: Turn) -> None: ...
    def rewrite(self, turns: Sequence[Turn]) -> None: ...


@dataclass(slots=True)
class Conversation:
    """Turns in order, the system prompt (if any) first. Every change goes to `record` at once.

    Whatever `record` raises comes after the change; `behind` says that the next change has to write everything.
    `before_reset` is what `reset` took away.
    """

    turns: list[Turn] = field(default_factory=list)
    record: Record | None = None
    behind: bool = False
    before_reset: list[Turn] = field(default_factory=list)

    @property
    def messages(self) -> Messages:
        return tuple(turn.message for turn in self.turns)

    @property
    def system(self) -> str | None:
        first = self.turns[0].message if self.turns else None
        return first.content if first and first.role == "system" else None

    @property
    def questions(self) -> int:
        return len(self._starts())

    @property
    def asked(self) -> Messages:
        """The messages up to the last question."""
        return self.messages[: self._end_of_question()]

    @property
    def reply(self) -> Turn | None:
        """The answer that stands last."""
        last = self.turns[-1] if self.turns else None
        return last if last and last.message.role == "assistant" else None

    @property
    def left_out(self) -> int:
        """The oldest messages (the system prompt apart) that were not sent any more when the last answer was made."""
        return next((turn.made.dropped for turn in reversed(self.turns) if turn.made), 0)

    def add(self, message: Message, *, partial: bool = False, made: Made | None = None, edited: bool = False) -> None:
        turn = Turn(message, partial, made, edited)
        self.turns.append(turn)
        self._write(turn)

    def answer(self, turn: Turn) -> None:
        """`turn` becomes the answer to the last question, in place of what came after that."""
        kept = self.turns[: self._end_of_question()]
        if kept == self.turns:
            self.turns.append(turn)
            self._write(turn)
        else:
            self.replace([*kept, turn])

    def set_system(self, text: str | None) -> None:
        """Answers remember the one that they were made with."""
        before = self.system
        if (text or None) == before:
            return
        rest = self.turns[1:] if before is not None else self.turns
        self.replace(
            [*([Turn(Message("system", text))] if text else []), *(_under(turn, before or "") for turn in rest)]
        )

    def undo(self, count: int = 1) -> int:
        """Takes back the last `count` questions with their answers; returns how many there were to take."""
        taken = self._starts()[-count:] if count > 0 else []
        if taken:
            self.replace(self.turns[: taken[0]])
        return len(taken)

    def reset(self) -> None:
        """Only the system prompt stays."""
        if self.questions:
            self.before_reset = self.turns
        self.replace(self.turns[:1] if self.system is not None else [])

    def take_back_reset(self) -> bool:
        """False when there was none."""
        turns, self.before_reset = self.before_reset, []
        if turns:
            self.replace(turns)
        return bool(turns)

    def replace(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self._write(None)

    def _starts(self) -> list[int]:
        return [i for i, turn in enumerate(self.turns) if turn.message.role == "user"]

    def _end_of_question(self) -> int:
        starts = self._starts()
        return starts[-1] + 1 if starts else 0

    def _write(self, added: Turn | None) -> None:
        if self.record is None:
            return
        behind, self.behind = self.behind, True
        if added is None or behind:
            self.record.rewrite(self.turns)
        else:
            self.record.append(added)
        self.behind = False


def _under(turn: Turn, system: str) -> Turn:
    made = turn.made
    return replace(turn, made=replace(made, system=system)) if made and made.system is None else turn
