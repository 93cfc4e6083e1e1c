"""Commands that work on what was said: /retry, /continue, /edit-reply, /edit, /undo, /branch, /reset.

What stays of the list is in the prefix cache already, so that none of them makes the model read it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from minicpm_cli.chat import given, tuning
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.chat.editor import edited
from minicpm_cli.errors import UsageError


def retry(chat: Chat, argument: str) -> None:
    values = given.assignments(argument, "/retry")
    params = chat.params_with(values)
    if not values and (params.seed is not None or params.temperature == 0):
        why = "at temperature 0" if params.temperature == 0 else f"with seed {params.seed}"
        chat.terminal.note(f"{why} the answer stays the same; try /retry temperature=0.9 or /retry seed=N")
    chat.retry(values)


def go_on(chat: Chat, argument: str) -> None:
    chat.go_on(given.assignments(argument, "/continue"))


def retry_words(chat: Chat, typed: str) -> Iterable[str]:
    name, equals, _ = typed.split(" ")[-1].partition("=")
    if not equals:
        return [f"{known}=" for known in given.NAMES]
    return [f"{name}={value}" for value in tuning.values(chat, name) if value != "default"]


def edit_reply(chat: Chat, argument: str) -> None:
    turn = chat.conversation.reply
    if turn is None:
        raise UsageError("there is no reply to edit")
    text = edited(turn.message.content)
    if text is None or text == turn.message.content.removesuffix("\n"):
        chat.terminal.line("the reply is as it was")
        return
    message = replace(turn.message, content=text)
    chat.conversation.replace([*chat.conversation.turns[:-1], Turn(message, edited=True, time=turn.time)])
    chat.terminal.line("the reply is changed; ask on, or /continue lets the model go on from it")


def edit(chat: Chat, argument: str) -> None:
    text = edited(argument)
    if text is None or not text.strip():
        chat.terminal.line("nothing was written")
        return
    chat.draft = text


def undo(chat: Chat, argument: str) -> None:
    count = _number("/undo", argument)
    if not chat.conversation.questions and chat.conversation.take_back_reset():
        chat.terminal.line(f"took back the reset: {_questions(chat.conversation.questions)} again")
        return
    taken = chat.conversation.undo(count)
    left = chat.conversation.questions
    chat.terminal.line(f"took back {_questions(taken)}; {left} left" if taken else "there is no question to take back")


def reset(chat: Chat, argument: str) -> None:
    chat.conversation.reset()
    chat.terminal.line(
        "a new beginning; "
        + ("the system prompt stays; " if chat.conversation.system else "")
        + "/undo at once takes that back"
    )


def branch(chat: Chat, argument: str) -> None:
    name, _, back = argument.partition(" ")
    if not name:
        _list_branches(chat)
    elif name == "-":
        if chat.before is None:
            raise UsageError("there is no branch that you came from")
        _go(chat, chat.before)
    elif (target := chat.sessions.branch(chat.name, name)) == chat.name or chat.sessions.exists(target):
        if back:
            raise UsageError(f"there is a branch {name} already; /branch {name} goes there")
        _go(chat, target)
    else:
        _begin(chat, target, _number("/branch NAME", back) if back else 0)


def branch_words(chat: Chat, typed: str) -> Iterable[str]:
    return () if " " in typed else chat.sessions.branches(chat.name)


def _list_branches(chat: Chat) -> None:
    for name in chat.sessions.branches(chat.name):
        here = "*" if chat.sessions.branch(chat.name, name) == chat.name else " "
        chat.terminal.line(f"{here} {name}")
    chat.terminal.line("/branch NAME begins one here, or goes there")


def _begin(chat: Chat, target: str, back: int) -> None:
    """The new branch has what was said so far, less the last `back` questions; the old one stays as it is."""
    begun = Conversation(list(chat.conversation.turns))
    begun.undo(back)
    chat.sessions.transcript(target).rewrite(begun.turns)
    _go(chat, target)


def _go(chat: Chat, name: str) -> None:
    chat.switch(name)
    chat.terminal.line(f"now on {name}, with {_questions(chat.conversation.questions)}; /branch - goes back")


def _number(command: str, argument: str) -> int:
    if argument and not (argument.isdecimal() and 0 < int(argument) < 1_000_000):
        raise UsageError(f"{command} takes a number of questions, not {argument!r}")
    return int(argument or 1)


def _questions(count: int) -> str:
    return f"{count} question{'' if count == 1 else 's'}"
