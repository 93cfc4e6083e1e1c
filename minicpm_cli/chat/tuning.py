"""Commands that change how the model answers: /system, /set, /think."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import cast

from minicpm_cli.chat import given
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.overflow import OVERFLOWS, Overflow
from minicpm_cli.errors import UsageError
from minicpm_cli.settings_table import ENTRIES

_SWITCHES = ("plain", "verbose")  # of the terminal
_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"overflow": OVERFLOWS, **dict.fromkeys(_SWITCHES, ("on", "off"))}
)
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
    else:
        chat.given[name] = given.value(name, text, "/set")


def _change_own(chat: Chat, name: str, text: str) -> None:
    if name in _SWITCHES:
        setattr(chat.terminal, name, text != "default" and ENTRIES[name].checked(text, "/set"))
    elif text not in (*OVERFLOWS, "default"):
        raise UsageError(f"/set: overflow is {text!r}; it must be one of {', '.join(OVERFLOWS)}")
    else:
        chat.overflow = "stop" if text == "default" else cast(Overflow, text)


def _state(chat: Chat, name: str) -> str:
    if name in _OWN:
        state = getattr(chat.terminal if name in _SWITCHES else chat, name)
        return ("on" if state else "off") if name in _SWITCHES else state
    value = getattr(chat.params, name)
    shown = "unset" if value in (None, ()) else repr(value)
    return f"{shown} ({'set' if name in chat.given else 'default'})"


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
    if argument and argument not in _THINK:
        raise UsageError(f"/think takes on, off or default, not {argument!r}")
    if argument:
        chat.given["think"] = _THINK[argument]
    state = {True: "on", False: "off", None: "as the template has it"}[chat.params.think]
    chat.terminal.line(f"thinking: {state}")


def think_words(chat: Chat, typed: str) -> Iterable[str]:
    return tuple(_THINK)
