"""The functions that transformers offers to chat templates beside jinja's own."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace as JinjaNamespace


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Not jinja's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class RaisedByTemplate(TemplateRuntimeError):
    """The template refuses the messages."""


def raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().astimezone().strftime(format)


class Namespace(JinjaNamespace):
    """Its text does not show its attributes: namespaces that hold each other would print without end."""

    def __repr__(self) -> str:
        return "<Namespace>"
