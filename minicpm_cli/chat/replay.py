"""A session once more: the same questions with the settings and seeds of their answers, to the same model or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Turn
from minicpm_cli.chat.made import Made
from minicpm_cli.types import Message, SamplingParams


@dataclass(slots=True)
class Outcome:
    """Answers that came out as they were, and others; `loose` ones had no recorded settings to come out with."""

    same: int = 0
    other: int = 0
    loose: int = 0

    def line(self) -> str:
        told = f"{self.same} of {self.same + self.other} answers are as they were"
        return told + (f"; {self.loose} had no recorded settings and seed" if self.loose else "")


def replay(chat: Chat, turns: Sequence[Turn], changed: Mapping[str, Any]) -> Outcome:
    """Asks all of `turns` again, in an empty `chat`; `changed` settings take the place of the recorded ones.

    What the user wrote into an answer stays as it is. It ends early when Ctrl-C stops an answer.
    """
    outcome, question = Outcome(), None
    system = next((turn.message.content for turn in turns[:1] if turn.message.role == "system"), None)
    for turn in turns:
        message = turn.message
        if message.role == "user":
            _keep(chat, question)
            question = message
        elif message.role == "system" and turn is turns[0]:
            chat.conversation.set_system(system)
        elif message.role != "assistant" or turn.edited:
            _keep(chat, question, message)
            question = None
        else:
            then = turn.made.system if turn.made else None
            chat.conversation.set_system(system if then is None else then)
            _again(chat, question, turn, changed)
            question = None
            if chat.stopped and not turn.partial:
                return outcome
            _compare(chat, turn, outcome)
    _keep(chat, question)
    chat.conversation.set_system(system)
    return outcome


def _keep(chat: Chat, *messages: Message | None) -> None:
    for message in messages:
        if message is not None:
            chat.conversation.add(message, edited=message.role == "assistant")


def _again(chat: Chat, question: Message | None, turn: Turn, changed: Mapping[str, Any]) -> None:
    made, most = turn.made or Made(chat.source), _length(turn.message) if turn.partial else None
    values = {**(_values(made) if turn.made else {}), **changed}
    chat.overflow = "drop-oldest" if made.dropped else "stop"
    if question is not None:
        chat.terminal.line(f"> {question.content}")
    if made.given:
        begun = Message("assistant", turn.message.content[: made.given], turn.message.reasoning)
        _keep(chat, question, begun)
        chat.go_on(values, most)
    elif question is not None:
        chat.say(question.content, values, most)
    else:
        chat.retry(values)


def _values(made: Made) -> dict[str, Any]:
    """All values as they were, whatever the model's own ones are."""
    params = SamplingParams().checked(made.settings)
    return {f.name: getattr(params, f.name) for f in fields(params)} | {"seed": made.seed}


def _length(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "")


def _compare(chat: Chat, turn: Turn, outcome: Outcome) -> None:
    now = chat.conversation.reply
    if turn.made is None:
        outcome.loose += 1
    elif now is not None and now.message == turn.message:
        outcome.same += 1
    else:
        outcome.other += 1
        chat.terminal.line(f"minicpm: this answer was another one: {_difference(turn.message, now)}")


def _difference(before: Message, now: Turn | None) -> str:
    old, new = before.content, now.message.content if now else ""
    place = next(
        (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
    )
    return f"from character {place + 1} on it was {old[place : place + 40]!r}"
