"""A session once more: the same questions with the settings and seeds of their answers, to the same model or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Messages, Turn
from minicpm_cli.chat.made import Made
from minicpm_cli.chat.overflow import without
from minicpm_cli.types import Message, Request, SamplingParams


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
    return _Replay(chat, changed).run(turns)


class _Replay:
    def __init__(self, chat: Chat, changed: Mapping[str, Any]) -> None:
        self._chat, self._changed = chat, changed
        self._outcome = Outcome()
        self._question: Message | None = None  # not asked yet
        self._read: list[Sequence[int]] = []  # the tokens that the model has read, answers among them
        self._loaded = 0  # when the model was loaded that gave the last answer

    def run(self, turns: Sequence[Turn]) -> Outcome:
        first = turns[0].message if turns else None
        system = first.content if first and first.role == "system" else None
        self._chat.conversation.set_system(system)
        for turn in turns[1:] if system is not None else turns:
            if not self._turn(turn, system):
                return self._outcome
        self._keep()
        self._chat.conversation.set_system(system)
        return self._outcome

    def _turn(self, turn: Turn, system: str | None) -> bool:
        """False when the user has stopped it."""
        message, made = turn.message, turn.made
        if message.role == "user":
            self._keep()
            self._question = message
        elif message.role != "assistant" or turn.edited:
            self._keep(message)
        else:
            self._chat.conversation.set_system(system if made is None or made.system is None else made.system)
            if self._question is not None:
                self._chat.terminal.line(f"> {self._question.content}")
            self._again(made, message, _length(message) if turn.partial else None)
            if self._chat.stopped:
                return False
            self._compare(turn)
        return True

    def _keep(self, *more: Message) -> None:
        for message in (*((self._question,) if self._question else ()), *more):
            self._chat.conversation.add(message, edited=message.role == "assistant")
        self._question = None

    def _again(self, made: Made | None, message: Message, most: int | None) -> None:
        """The answer, in as many parts as it was made in."""
        chat, question = self._chat, self._question
        values = {**(_values(made) if made else {}), **self._changed}
        chat.overflow = "drop-oldest" if made and made.dropped else "stop"
        if made and made.given:
            self._begin(made, message)
            self._prime(made, chat.conversation.asked, chat.conversation.messages[-1].content)
            chat.go_on(values, most)
        elif question is not None:
            self._question = None
            self._prime(made, (*chat.conversation.messages, question))
            chat.say(question.content, values, most)
        else:
            self._prime(made, chat.conversation.asked)
            chat.retry(values)
        self._read.append(chat.llm.prompt(chat.request()))

    def _begin(self, made: Made, message: Message) -> None:
        """The part of the answer that was there when the model went on with it."""
        part = replace(message, content=message.content[: made.given])
        if made.begun is None:
            self._keep(part)
        else:
            self._again(made.begun, part, _length(part))

    def _prime(self, made: Made | None, messages: Messages, prefill: str = "") -> None:
        """Lets the model have as much of a prompt in its cache as it had then, where that was much more or much less.

        It has more after /retry, and none when a session goes on another day. A prompt that is read in other pieces is
        rounded elsewhere, and in 16 bits that may decide a token.
        """
        if made is None or made.usage is None:
            return
        chat = self._chat
        if made.source.loaded != self._loaded:
            self._loaded = made.source.loaded
            self._forget()
        params = chat.params_with({"max_tokens": 1, "temperature": 0.0, "think": made.settings.get("think")})
        request = Request("prime", without(messages, made.dropped), params, prefill)
        ids = chat.llm.prompt(request)
        known = max((_common(ids, read) for read in self._read), default=0)
        cached = made.usage.cached_tokens
        if not cached and known:
            self._forget()
        elif cached > known and len(ids) < chat.llm.info.context:
            with closing(chat.llm.stream([request])) as events:
                for _ in events:
                    pass

    def _forget(self) -> None:
        self._chat.llm.forget()
        self._read.clear()

    def _compare(self, turn: Turn) -> None:
        now = self._chat.conversation.reply
        if turn.made is None:
            self._outcome.loose += 1
        elif now is not None and now.message == turn.message:
            self._outcome.same += 1
        else:
            self._outcome.other += 1
            self._chat.terminal.line(f"minicpm: this answer was another one: {_difference(turn, now)}")


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the beginning that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _values(made: Made) -> dict[str, Any]:
    """All values as they were, whatever the model's own ones are."""
    params = SamplingParams().checked(made.settings)
    return {f.name: getattr(params, f.name) for f in fields(params)} | {"seed": made.seed}


def _length(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "")


def _difference(then: Turn, now: Turn | None) -> str:
    old, new = then.message.content, now.message.content if now else ""
    place = _common(old, new)
    told = f"from character {place + 1} on it was {old[place : place + 40]!r}"
    before, after = _cached(then), _cached(now)
    if before != after:
        told += f" ({before} tokens of its prompt were in the cache, now {after}: that rounds differently in 16 bits)"
    return told


def _cached(turn: Turn | None) -> int | None:
    usage = turn.made.usage if turn and turn.made else None
    return usage.cached_tokens if usage else None
