"""What a setting may be, one check a kind: it returns the value or raises ValueError("what it must be").

Strings are read as what they spell, since environment variables have nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minicpm_cli.disk import path_of
from minicpm_cli.types import check_sampling

DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
PROFILE_PATTERN = re.compile(r"[\w-]{1,100}")
SERVER_PATTERN = re.compile(r"(https?://)?[\w.\-\[\]:%]+(:\d{1,5})?(/\S*)?")
REPO_PATTERN = re.compile(r"\w[\w.-]*/[\w.-]+(@\w[\w./-]*)?")
TEMPLATES = ("auto", "chatml", "minicpm")
_LARGEST = 2**31 - 1
_WORDS: Mapping[str, bool] = MappingProxyType(
    {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
)


def one_of(*choices: str, none: str | None = None) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value not in choices and (none is None or value != none):
            raise ValueError("one of " + ", ".join((*choices, none) if none else choices))
        return None if value == none else str(value)

    return check


def called(check: Callable[[Any], Any], also: Mapping[str, str]) -> Callable[[Any], Any]:
    """Takes other programs' names of a value, too."""
    return lambda value: check(also.get(value, value) if isinstance(value, str) else value)


def _number(value: Any) -> Any:
    """A string as the number it spells; anything else is left for the check to refuse."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def whole(low: int, high: int = _LARGEST, *, auto: bool = True) -> Callable[[Any], int | None]:
    def check(value: Any) -> int | None:
        number = _number(value)
        if auto and value == "auto":
            return None
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise ValueError(f"a whole number from {low} to {high}" + (" or auto" if auto else ""))
        return number

    return check


def fraction(value: Any) -> float:
    number = _number(value)
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 < number <= 1:
        raise ValueError("a number in (0, 1]")
    return float(number)


def head_bits(value: Any) -> int:
    if _number(value) not in (4, 8, 16) or isinstance(_number(value), float):
        raise ValueError("4, 8 or 16")
    return int(_number(value))


def switch(value: Any) -> bool:
    word = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(word, bool):
        raise ValueError("true or false")
    return word


def text(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError("a non-empty string")
    return str(value)


def server(value: Any) -> str | None:
    if value == "none":
        return None
    if not SERVER_PATTERN.fullmatch(text(value)):
        raise ValueError("an address such as http://127.0.0.1:8000, or none")
    return str(value)


def device(value: Any) -> str:
    if not isinstance(value, str) or not DEVICE_PATTERN.fullmatch(value):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return value


def template(value: Any) -> str:
    if value in TEMPLATES:
        return str(value)
    path = path_of(text(value))
    if not path.is_file():
        raise ValueError(f"{', '.join(TEMPLATES)} or a file that exists")
    return str(path)


def adapter(value: Any) -> str | None:
    """A folder, or the id of a repository as it is."""
    if value == "none":
        return None
    path = path_of(text(value))
    if path.is_dir():
        return str(path)
    if path.exists() or not REPO_PATTERN.fullmatch(str(value)):
        raise ValueError("a directory that exists, a hub repo id (owner/name), or none")
    return str(value)


def path(value: Any) -> Path:
    return path_of(text(value))


def profile(value: Any) -> str | None:
    if not isinstance(value, str) or not PROFILE_PATTERN.fullmatch(value):
        raise ValueError("the name of a profile (letters, digits, - and _) or none")
    return None if value == "none" else value


def schema(value: Any) -> str:
    """JSON text as it is; of a file what it holds."""
    if isinstance(value, dict):  # a table of the config file
        return json.dumps(value)
    written = text(value).strip()
    if written.startswith(("{", "[", '"')) or written in ("true", "false", "null"):
        return written
    try:
        return path_of(written).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ValueError(f'JSON such as {{"type": "object"}}, or a file that holds it ({why})') from None


def biases(value: Any) -> Any:
    """A text is JSON, or one token's."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.lstrip().startswith(("{", "[")) else [value]
    except ValueError:
        raise ValueError('ids of tokens and their biases, such as {"15043": -100}') from None


def sampling(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if name in ("think", "ignore_eos"):
            value = switch(value)
        elif name == "schema":
            value = schema(value)
        elif name == "logit_bias":
            value = biases(value)
        elif name not in ("stop", "schema", "regex"):
            value = _number(value)
        return check_sampling({name: value})[name]

    return check
