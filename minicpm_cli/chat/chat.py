"""One conversation with one model: a question goes in, the reply is shown as it comes and becomes part of the list."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minicpm_cli.chat.attach import quoted
from minicpm_cli.chat.conversation import Conversation, Messages, fit
from minicpm_cli.chat.interrupts import Interrupts
from minicpm_cli.chat.keyboard import unechoed
from minicpm_cli.chat.reply import Reply
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.view import view_for
from minicpm_cli.errors import ContextOverflow
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.types import Message, Request, SamplingParams, Usage

Overflow = Literal["stop", "drop-oldest"]
_ROOM_FOR_ANSWER = 512  # tokens kept free for an answer of no set length, where old messages may go


@dataclass(slots=True)
class Chat:
    """`given` holds the sampling values that the user set; `attached` files wait for the next question."""

    llm: LanguageModel
    terminal: Terminal
    sessions: Sessions
    conversation: Conversation
    name: str
    given: dict[str, Any] = field(default_factory=dict)
    overflow: Overflow = "stop"
    attached: list[tuple[str, str]] = field(default_factory=list)
    last: Reply | None = None
    stopped: bool = False  # whether Ctrl-C ended the last reply
    total: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    _dropped: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.llm.defaults.checked(self.given)

    def request(self, messages: Messages | None = None) -> Request:
        return Request("chat", self.conversation.messages if messages is None else messages, self.params)

    def say(self, text: str) -> None:
        """Asks `text`, with the attached files before it. Raises ContextOverflow with the conversation unchanged."""
        parts = [quoted(name, body) for name, body in self.attached]
        question = Message("user", "\n\n".join([*parts, text] if text else parts))
        before = self.conversation.messages
        messages = self._fitting((*before, question))
        self.conversation.add(question)
        try:
            self._answer(messages, withdraw=True)
        finally:
            if self.conversation.messages != before:  # else it was taken back, and its files wait on
                self.attached.clear()

    def retry(self) -> None:
        """Answers the last question anew; the old answer goes when a new one has begun."""
        if self.conversation.questions:
            self._answer(self._fitting(self.conversation.asked), withdraw=False)
        else:
            self.terminal.note("there is no question to answer again")

    def room(self) -> int:
        """Tokens of the context that are still free."""
        messages = self.conversation.messages
        return self.llm.info.context - (len(self.llm.prompt(self.request())) if messages else 0)

    def _fitting(self, messages: Messages) -> Messages:
        """`messages`, or what of them fits the context where the user lets old ones go."""
        context, wanted = self.llm.info.context, self.params.max_tokens
        tokens = self._count(messages)
        if self.overflow == "stop":
            if tokens + (wanted or 1) > context:
                raise ContextOverflow(tokens, wanted or 1, context)
            return messages
        kept, dropped = fit(messages, self._count, context - (wanted or min(_ROOM_FOR_ANSWER, context // 4)))
        self._report_dropped(messages, dropped)
        return kept

    def _count(self, messages: Messages) -> int:
        return len(self.llm.prompt(self.request(messages)))

    def _report_dropped(self, messages: Messages, dropped: int) -> None:
        if dropped > self._dropped:
            first = next(m for m in messages if m.role != "system").content
            start = " ".join(first.split())[:40]
            self.terminal.note(f"the context is full: the {dropped} oldest messages are not sent, from {start!r} on")
        self._dropped = dropped

    def _answer(self, messages: Messages, *, withdraw: bool) -> None:
        """Shows and keeps the reply; with `withdraw` the question goes when nothing comes of it."""
        reply = Reply()
        with Interrupts() as interrupts:
            try:
                self.stopped = not self._stream(messages, reply, interrupts)
            except BaseException:
                interrupts.keeping = True
                self._keep(reply, partial=True, withdraw=withdraw)
                raise
            interrupts.keeping = True
            self._keep(reply, partial=self.stopped, withdraw=withdraw)
        self._report(reply, withdrawn=withdraw)

    def _report(self, reply: Reply, *, withdrawn: bool) -> None:
        if self.stopped:
            self.terminal.note(_stopped(reply, withdrawn=withdrawn))
        if reply.cut:
            self.terminal.note("the reply was cut at the limit of tokens: /set max_tokens N, or say: go on")
        self.terminal.detail(reply.summary())

    def _stream(self, messages: Messages, reply: Reply, interrupts: Interrupts) -> bool:
        """Shows the reply; False when Ctrl-C stopped it."""
        view = view_for(self.terminal)
        with unechoed(), closing(self.llm.stream([self.request(messages)])) as events:
            try:
                for event in reply.follow(events):
                    interrupts.begun = True
                    view.show(event.channel, event.text)
                    if interrupts.pressed and event.finish is None:
                        return False
            except KeyboardInterrupt:
                return False
            finally:
                view.end()
        return True

    def _keep(self, reply: Reply, *, partial: bool, withdraw: bool) -> None:
        self.last = reply
        if reply.usage:
            self.total = _sum(self.total, reply.usage)
        if not reply.empty or not partial:
            self.conversation.take_answer()
            self.conversation.add(reply.message, partial=partial)
        elif withdraw:
            self.conversation.undo()


def _stopped(reply: Reply, *, withdrawn: bool) -> str:
    if not reply.empty:
        return "stopped; what came is kept as a partial reply (/retry, /undo)"
    return "stopped before the first word; " + ("the question is taken back" if withdrawn else "nothing is changed")


def _sum(total: Usage, usage: Usage) -> Usage:
    return replace(
        total,
        prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
        completion_tokens=total.completion_tokens + usage.completion_tokens,
        cached_tokens=total.cached_tokens + usage.cached_tokens,
    )
