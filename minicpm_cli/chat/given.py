"""Settings as they are typed in a chat: checked exactly as the flags of the same names are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from minicpm_cli.errors import UsageError
from minicpm_cli.settings_table import ENTRIES, nearest
from minicpm_cli.types import SamplingParams

NAMES = tuple(f.name for f in fields(SamplingParams) if f.name != "logprobs")  # which a chat has no place for


def known(name: str, others: Iterable[str] = ()) -> str:
    """The setting that is called `name`, - and _ being the same. Raises UsageError with the nearest one."""
    names = [*NAMES, *others]
    found = name.strip().lower().lstrip("-").replace("-", "_")
    if found in names:
        return found
    near = nearest(found, names)
    raise UsageError(
        f"unknown setting {name!r}. " + (f"Did you mean {near}?" if near else f"Settings: {', '.join(names)}")
    )


def value(name: str, text: str, where: str) -> Any:
    """What `text` means as a value of the sampling setting `name`. Raises UsageError saying what it must be."""
    return ENTRIES[name].checked(_stops(text) if name == "stop" else text, where)


def assignments(text: str, where: str) -> dict[str, Any]:
    """`temperature=0.9 stop="a b"` as values."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}. Write NAME=VALUE, e.g. temperature=0.9") from None
    return dict(_assignment(word, where) for word in words)


def _assignment(word: str, where: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals:
        raise UsageError(f"{word!r} is no setting: write NAME=VALUE, e.g. temperature=0.9")
    name = known(name)
    return name, value(name, text, where)


def _stops(text: str) -> Any:
    """A JSON string or list of strings is read as such, so that a newline can be written; else the text itself."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, str | list) else text
