"""When the messages are too long for the context: what could be left out, and how that is said. Nothing is sent first.

The system prompt and the last question always stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from minicpm_cli.chat.conversation import Messages
from minicpm_cli.chat.sessions import beginning
from minicpm_cli.errors import ContextOverflow

Overflow = Literal["stop", "drop-oldest"]
OVERFLOWS: tuple[Overflow, ...] = ("stop", "drop-oldest")
Choice = Literal["drop", "always", "stop"]
Count = Callable[[Messages], int]
_ROOM_FOR_ANSWER = 512  # tokens kept free for an answer of no set length, where old messages may go


@dataclass(frozen=True, slots=True)
class Excess:
    """A prompt of `tokens` is too much; without the oldest messages up to `dropped` it has `kept` tokens."""

    tokens: int
    wanted: int  # tokens for the answer
    context: int
    dropped: int
    kept: int
    questions: int  # of the dropped messages
    first: str  # how the first of them begins

    def said(self) -> str:
        over = self.tokens + self.wanted - self.context
        room = f", {self.wanted} for the answer" if self.wanted > 1 else ""
        return f"{over} tokens too many: {self.tokens} with what was said before{room}, in a context of {self.context}"

    def gone(self) -> str:
        many = f"the {self.questions} oldest questions" if self.questions > 1 else "the oldest question"
        return f"{many}, from {self.first!r} on"

    def offer(self) -> str:
        return f"{self.gone()} ({self.tokens - self.kept} tokens)"


def without(messages: Messages, dropped: int) -> Messages:
    """`messages` without the `dropped` oldest ones after the system prompt; the last question stays."""
    system = _system(messages)
    rest = messages[system:]
    last = max((i for i, message in enumerate(rest) if message.role == "user"), default=0)
    return messages[:system] + rest[min(dropped, last) :]


def fit(messages: Messages, count: Count, limit: int, least: int = 0) -> tuple[Messages, int]:
    """The newest messages whose prompt has at most `limit` tokens, and how many old ones were left out.

    At least `least` of them are; what is left out ends before a question. Raises ContextOverflow when the last
    question alone is too long.
    """
    rest = messages[_system(messages) :]
    starts = [least, *(i for i, message in enumerate(rest) if message.role == "user" and i > least)]
    first = bisect_left(starts, True, key=lambda dropped: count(without(messages, dropped)) <= limit)
    if first == len(starts):
        raise ContextOverflow(count(without(messages, starts[-1])), 0, limit)
    return without(messages, starts[first]), starts[first]


def room_for_answer(wanted: int | None, context: int) -> int:
    """Tokens to keep free of old messages."""
    return wanted or min(_ROOM_FOR_ANSWER, context // 4)


def excess(messages: Messages, count: Count, wanted: int | None, context: int, least: int) -> Excess:
    """What is too much, and the least that could go. Raises ContextOverflow when the last question is too long."""
    tokens = count(without(messages, least))
    kept, dropped = _fit(messages, count, wanted, context, least)
    gone = messages[_system(messages) :][least:dropped]
    questions = sum(message.role == "user" for message in gone)
    return Excess(tokens, wanted or 1, context, dropped, count(kept), questions, beginning(gone[0].content))


def _fit(messages: Messages, count: Count, wanted: int | None, context: int, least: int) -> tuple[Messages, int]:
    """With room for an answer if there can be any, else with the least."""
    least_room = wanted or 1
    for room in (room_for_answer(wanted, context), least_room):
        try:
            return fit(messages, count, context - room, least)
        except ContextOverflow as error:
            alone = error.prompt_tokens
    raise ContextOverflow(alone, least_room, context)


def _system(messages: Messages) -> int:
    return 1 if messages and messages[0].role == "system" else 0
