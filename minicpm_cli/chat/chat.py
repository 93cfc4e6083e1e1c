"""One conversation with one model: a question goes in, the reply is shown as it comes and becomes part of the list."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from minicpm_cli.chat.attach import quoted
from minicpm_cli.chat.claim import Claim
from minicpm_cli.chat.conversation import Conversation, Messages, Turn
from minicpm_cli.chat.interrupts import Interrupts
from minicpm_cli.chat.keyboard import unechoed
from minicpm_cli.chat.loops import Loop, OnLoop
from minicpm_cli.chat.made import Made, Source, settings_of
from minicpm_cli.chat.open_end import open_end
from minicpm_cli.chat.overflow import Choice, Excess, Overflow, excess, without
from minicpm_cli.chat.reply import Reply
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.view import view_for
from minicpm_cli.errors import ContextOverflow, FileError, MinicpmError, RequestError, UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.types import Message, Request, SamplingParams, Usage

Given = Mapping[str, Any]
_SEED_BITS = 53  # a JSON number holds it exactly
_LITTLE_ROOM = 128  # tokens for an answer, below which the user is told


@dataclass(frozen=True, slots=True)
class Order:
    """An answer that is wanted: what is sent, without the `dropped` oldest messages, and how it is drawn.

    `prefill` is its beginning. Where `withdraw`, the question goes when nothing comes of it. It ends as a partial reply
    when it has `most` characters, thoughts among them.
    """

    messages: Messages
    params: SamplingParams
    dropped: int = 0
    prefill: str = ""
    withdraw: bool = False
    most: int | None = None


def _stop(excess: Excess) -> Choice:
    return "stop"


@dataclass(slots=True)
class Chat:
    """`given` holds the sampling values that the user set; `attached` files wait for the next question.

    `draft` is what the next prompt begins with. `choose` is asked what to do when the context is full.
    """

    llm: LanguageModel
    terminal: Terminal
    sessions: Sessions
    conversation: Conversation
    name: str
    given: dict[str, Any] = field(default_factory=dict)
    overflow: Overflow = "stop"
    loops: OnLoop = "stop"
    source: Source = field(default_factory=lambda: Source(""))
    choose: Callable[[Excess], Choice] = _stop
    attached: list[tuple[str, str]] = field(default_factory=list)
    draft: str = ""
    last: Reply | None = None
    stopped: bool = False  # whether Ctrl-C ended the last reply
    replies: int = 0
    total: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    before: str | None = None  # the session that was left for this one
    claim: Claim | None = None  # on the session

    @property
    def params(self) -> SamplingParams:
        return self.params_with({})

    def params_with(self, given: Given) -> SamplingParams:
        return self.llm.defaults.checked({**self.given, **given})

    def request(self, messages: Messages | None = None) -> Request:
        return Request("chat", self.conversation.messages if messages is None else messages, self.params)

    def question(self, text: str) -> Message:
        """`text` with the attached files before it."""
        parts = [quoted(name, body) for name, body in self.attached]
        return Message("user", "\n\n".join([*parts, text] if text else parts))

    def say(self, text: str, given: Given | None = None, most: int | None = None) -> None:
        """Asks `text`. Raises ContextOverflow with the conversation unchanged. `most`: see Order."""
        question = self.question(text)
        before = self.conversation.messages
        order = self._order((*before, question), given or {})
        self._store(lambda: self.conversation.add(question))
        try:
            self._answer(replace(order, withdraw=True, most=most))
        finally:
            if self.conversation.messages != before:  # else it was taken back, and its files wait on
                self.attached.clear()

    def retry(self, given: Given | None = None) -> None:
        """Answers the last question anew; the old answer goes when a new one has begun."""
        if not self.conversation.questions:
            raise UsageError("there is no question to answer again")
        self._answer(self._order(self.conversation.asked, given or {}))

    def go_on(self, given: Given | None = None, most: int | None = None) -> None:
        """Lets the model go on with the last reply. What it thought before is not shown to it again."""
        turn = self.conversation.reply
        if turn is None or not turn.message.content or not self.conversation.questions:
            raise UsageError("there is no reply to go on with" + (" but its thoughts: /retry" if turn else ""))
        given = dict(given or {}) | ({"think": False} if turn.message.reasoning is not None else {})
        order = self._order(self.conversation.asked, given, turn.message.content)
        self._answer(replace(order, most=most))

    def switch(self, name: str) -> None:
        """To another session, as it was left. Raises UsageError when it is open elsewhere."""
        if name == self.name:
            return
        claim = self.sessions.claim(name)
        try:
            conversation = self.sessions.open(name)
        except MinicpmError:
            claim.release()
            raise
        self.leave()
        self.claim, self.before, self.name = claim, self.name, name
        self.conversation, self.last = conversation, None

    def leave(self) -> None:
        """Lets another chat have the session."""
        if self.claim:
            self.claim.release()

    def room(self) -> int:
        """Tokens of the context that are still free."""
        sent = without(self.conversation.messages, self.conversation.left_out)
        return self.llm.info.context - (self.count(sent) if sent else 0)

    def count(self, messages: Messages, prefill: str = "") -> int:
        """Tokens of the prompt that `messages` make."""
        try:
            return len(self.llm.prompt(replace(self.request(messages), prefill=prefill)))
        except RequestError as error:
            if error.code != "context_overflow":
                raise
            return sum(len(message.content) for message in messages)  # so long that no token of it was counted

    def _order(self, messages: Messages, given: Given, prefill: str = "") -> Order:
        """With what of `messages` fits the context, where the user lets old ones go."""
        params, least, context = self._seeded(given), self.conversation.left_out, self.llm.info.context
        tokens = self.count(without(messages, least), prefill)
        if tokens + (params.max_tokens or 1) <= context:
            self._warn(params, context - tokens)
            return Order(without(messages, least), params, least, prefill)
        found = excess(messages, lambda m: self.count(m, prefill), params.max_tokens, context, least)
        if self._choice(found) == "stop":
            raise ContextOverflow(tokens, params.max_tokens or 1, context)
        self.terminal.note(f"the context is full, so the model does not see {found.gone()} any more")
        return Order(without(messages, found.dropped), params, found.dropped, prefill)

    def _seeded(self, given: Given) -> SamplingParams:
        """The seed is drawn here, so that also a reply that is stopped has one that is known."""
        params = self.params_with(given)
        return params if params.seed is not None else replace(params, seed=secrets.randbits(_SEED_BITS))

    def _warn(self, params: SamplingParams, room: int) -> None:
        if params.max_tokens is None and room < min(_LITTLE_ROOM, self.llm.info.context // 8):
            self.terminal.note(f"only {room} tokens of the context are left for the answer (/undo N, /reset, --ctx N)")

    def _choice(self, found: Excess) -> Choice:
        choice: Choice = "drop" if self.overflow == "drop-oldest" else self.choose(found)
        if choice == "always":
            self.overflow = "drop-oldest"
        return choice

    def _answer(self, order: Order) -> None:
        """Shows and keeps the reply."""
        reply = Reply(order.prefill, self.loops)
        with Interrupts() as interrupts:
            try:
                whole = self._stream(order, reply, interrupts)
            except BaseException:
                interrupts.keeping = self.stopped = True
                self._keep(order, reply, partial=True)
                raise
            interrupts.keeping = True
            self.stopped = not whole and not _enough(reply, order.most)
            self._keep(order, reply, partial=not whole or reply.looped is not None)
        self._report(order, reply)

    def _report(self, order: Order, reply: Reply) -> None:
        if self.stopped:
            self.terminal.note(_stopped(reply, withdrawn=order.withdraw))
        elif reply.looped:
            self.terminal.note(_looped(reply.looped))
        elif reply.empty and order.prefill:
            self.terminal.note("the model adds nothing")
        elif reply.unanswered:
            self.terminal.note("the model ended its reply without an answer (/retry; /think off where it only thinks)")
        if reply.cut:
            self.terminal.note(self._cut(reply, order))
        if reply.thought_out:
            self.terminal.note(
                f"thinking was ended at think_budget ({order.params.think_budget}); "
                "/retry think_budget=N lets it think longer"
            )
        if reply.incomplete:
            self.terminal.note("the reply is not whole: it ended before it was what the schema or regex asks for")
        self.terminal.detail(reply.summary())

    def _cut(self, reply: Reply, order: Order) -> str:
        used = reply.usage.prompt_tokens + reply.usage.completion_tokens if reply.usage else 0
        if used >= self.llm.info.context:
            return (
                f"the reply was cut: the context of {self.llm.info.context} tokens is full (/undo N, /reset, --ctx N)"
            )
        limit = order.params.max_tokens
        return f"the reply was cut at max_tokens ({limit}): /continue lets it go on, /set max_tokens N allows more"

    def _stream(self, order: Order, reply: Reply, interrupts: Interrupts) -> bool:
        """Shows the reply; False when Ctrl-C, or its wanted length, ended it."""
        view = view_for(self.terminal)
        request = Request("chat", order.messages, order.params, order.prefill)
        with unechoed(), closing(self.llm.stream([request])) as events:
            try:
                view.show("answer", open_end(order.prefill))
                for event in reply.follow(events):
                    interrupts.begun = True
                    view.show(event.channel, event.text)
                    if event.finish is None and (interrupts.pressed or _enough(reply, order.most)):
                        return False
            except KeyboardInterrupt:
                return False
            finally:
                view.end()
        return True

    def _keep(self, order: Order, reply: Reply, *, partial: bool) -> None:
        self.last = reply
        if reply.usage:
            self.replies += 1
            self.total = _sum(self.total, reply.usage)
        if not reply.empty or not (partial or order.prefill):
            turn = self._turn(order, reply, partial=partial)
            self._store(lambda: self.conversation.answer(turn))
        elif order.withdraw:
            self._store(self.conversation.undo)

    def _turn(self, order: Order, reply: Reply, *, partial: bool) -> Turn:
        message, before = reply.message, self.conversation.reply
        if order.prefill and before and message.reasoning is None:
            message = replace(message, reasoning=before.message.reasoning)
        settings, given = settings_of(order.params), len(order.prefill)
        begun = before.made if order.prefill and before else None
        made = Made(
            self.source, settings, order.params.seed, reply.finish, reply.usage, order.dropped, given, begun=begun
        )
        return Turn(message, partial, made)

    def _store(self, change: Callable[[], object]) -> None:
        """A full disk takes nothing from the conversation: it goes on, unsaved, and says so once."""
        said = self.conversation.behind
        try:
            change()
        except FileError as error:
            if not said:
                self.terminal.line(f"minicpm: {error} The conversation goes on, unsaved.")


def _enough(reply: Reply, most: int | None) -> bool:
    return most is not None and len(reply.text) + len(reply.thought or "") >= most


def _stopped(reply: Reply, *, withdrawn: bool) -> str:
    if not reply.empty:
        return "stopped; what came is kept as a partial reply (/continue, /retry, /undo)"
    return "stopped before the first word; " + ("the question is taken back" if withdrawn else "nothing is changed")


def _looped(loop: Loop) -> str:
    return (
        f"the model goes in circles ({loop}), so the reply was stopped; it is kept as a partial one. "
        "/retry repetition_penalty=1.1 may help, /undo takes it back, /set loops ignore lets such replies run on"
    )


def _sum(total: Usage, usage: Usage) -> Usage:
    return replace(
        total,
        prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
        completion_tokens=total.completion_tokens + usage.completion_tokens,
        cached_tokens=total.cached_tokens + usage.cached_tokens,
    )
