"""Commands that change how the model answers: /system, /set, /think."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from minicpm_cli.chat import given
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.loops import ON_LOOP
from minicpm_cli.chat.overflow import OVERFLOWS
from minicpm_cli.chat.view import PlainView
from minicpm_cli.errors import UsageError
from minicpm_cli.grammar.source import check
from minicpm_cli.settings_table import ENTRIES
from minicpm_cli.types import SamplingParams

_SWITCHES = ("plain", "verbose")  # of the terminal
_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"overflow": OVERFLOWS, "loops": ON_LOOP, **dict.fromkeys(_SWITCHES, ("on", "off"))}
)
_RIVALS = ("schema", "regex")  # one takes the place of the other
_FOLDED: Mapping[str, bool] = MappingProxyType({"show": False, "hide": True})
_THINK: Mapping[str, bool | None] = MappingProxyType({"on": True, "off": False, "default": None})


def system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_system(None if argument == "-" else argument)
    now = chat.conversation.system
    chat.terminal.line(f"system prompt: {now}" if now else "no system prompt; /system TEXT sets one, - removes it")


def set_(chat: Chat, argument: str) -> None:
    name, *rest = argument.split(None, 1)[:2] or [""]
    names = (*given.NAMES, *_OWN)
    shown = [given.known(name, _OWN)] if name else names
    if name and rest:
        _change(chat, shown[0], rest[0])
    width = max(map(len, shown))
    for each in shown:
        chat.terminal.line(f"{each:<{width}} = {_state(chat, each)}")


def _change(chat: Chat, name: str, text: str) -> None:
    if name in _OWN:
        _change_own(chat, name, text)
    elif text == "default":
        chat.given.pop(name, None)
    elif name in _RIVALS:
        chosen = {name: given.value(name, text, "/set")}
        check(SamplingParams(**chosen))
        chat.given = {**{n: v for n, v in chat.given.items() if n not in _RIVALS}, **chosen}
    else:
        chat.given[name] = given.value(name, text, "/set")


def _change_own(chat: Chat, name: str, text: str) -> None:
    if name in _SWITCHES:
        setattr(chat.terminal, name, text != "default" and ENTRIES[name].checked(text, "/set"))
    elif text not in (*_OWN[name], "default"):
        raise UsageError(f"/set: {name} is {text!r}; it must be one of {', '.join(_OWN[name])}")
    else:
        setattr(chat, name, _OWN[name][0] if text == "default" else text)


def _state(chat: Chat, name: str) -> str:
    if name in _OWN:
        state = getattr(chat.terminal if name in _SWITCHES else chat, name)
        return ("on" if state else "off") if name in _SWITCHES else state
    value = getattr(chat.params, name)
    return f"{_shown(value)} ({'set' if name in chat.given else 'default'})"


def _shown(value: object) -> str:
    """As it can be typed, but for what has several lines."""
    if value in (None, ()):
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, tuple):
        return repr(value) if "\n" in str(value) else str(value)
    pairs = dict(value) if isinstance(value[0], tuple) else None  # logit_bias
    return json.dumps(value if pairs is None else pairs, ensure_ascii=False)


def words(chat: Chat, typed: str) -> Iterable[str]:
    """Names of settings; behind one, its values."""
    name, behind, _ = typed.partition(" ")
    if not behind:
        return (*given.NAMES, *_OWN)
    return values(chat, name)


def values(chat: Chat, name: str) -> Iterable[str]:
    name = name.replace("-", "_")
    if name in _OWN:
        return (*_OWN[name], "default")
    if name == "think":
        return tuple(_THINK)
    now = getattr(chat.params, name, None)
    return ("default", *([f"{now:g}" if isinstance(now, float) else str(now)] if isinstance(now, int | float) else []))


def think(chat: Chat, argument: str) -> None:
    choices = (*_THINK, *_FOLDED)
    if argument and argument not in choices:
        raise UsageError(f"/think takes {', '.join(choices)}, not {argument!r}")
    if argument in _THINK:
        chat.given["think"] = _THINK[argument]
    if argument in _FOLDED:
        _fold(chat, _FOLDED[argument])
    state = {True: "on", False: "off", None: "as the template has it"}[chat.params.think]
    budget = "" if chat.params.think_budget is None else f", at most {chat.params.think_budget} tokens"
    chat.terminal.line(f"thinking: {state}{budget}, {'folded' if chat.terminal.folded else 'shown'}")
    if chat.params.think and not chat.llm.info.has_think_switch:
        chat.terminal.line("the chat template has no switch for it, so that changes nothing")


def _fold(chat: Chat, folded: bool) -> None:
    """What was folded last is shown as soon as that is wanted."""
    unfolded = chat.terminal.folded and not folded
    chat.terminal.folded = folded
    if unfolded and chat.last and chat.last.thought:
        view = PlainView(chat.terminal)
        view.show("think", chat.last.thought)
        view.end()


def think_words(chat: Chat, typed: str) -> Iterable[str]:
    return (*_THINK, *_FOLDED)
