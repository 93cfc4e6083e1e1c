"""The budget of one template run: steps, size of each value, size of the output, and seconds."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

LARGEST_NUMBER = 100_000  # that a width, an indent or a repeat count may be
_ELEMENT = 16  # an element of a list weighs as much as so many characters
_BITS = 4096  # largest integer
_GROWING_FORMAT = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


class Exhausted(TemplateRuntimeError):
    """The template used up its budget."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`size`: characters and elements of one value and of the output."""

    steps: int = 1_000_000
    size: int = 16_000_000
    seconds: float = 10.0


class Meter:
    """`start` begins a run; every other method raises Exhausted when the budget does not allow what comes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def start(self) -> None:
        self._steps = self._written = 0
        self._deadline = time.monotonic() + self._limits.seconds

    def tick(self, written: int = 0) -> None:
        """One operation, and `written` characters of output."""
        self._steps += 1
        if self._steps > self._limits.steps:
            raise Exhausted(f"the template takes more than {self._limits.steps} steps and was stopped")
        if time.monotonic() > self._deadline:
            raise Exhausted(f"the template runs for more than {self._limits.seconds:g} s and was stopped")
        self._written += written
        if self._written > self._limits.size:
            raise Exhausted(f"the template writes more than {self._limits.size} characters and was stopped")

    def value(self, value: Any) -> Any:
        """The value itself, if it is not too large."""
        self.tick()
        self._fits(_weight(value, self._limits.size))
        return value

    def output(self, value: Any) -> Any:
        self.tick(_weight(value, self._limits.size))
        return value

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Before a binary operator runs: can its result be too large?"""
        if operator == "%" and isinstance(left, str):
            self._format(left)
        elif operator == "*":
            self._fits(_product(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
            self._fits_bits(left.bit_length() * right)
        elif operator == "+":
            self._fits(_length(left) + _length(right))

    def call(self, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Before a function or a method of a value is called."""
        self.tick()
        given = [*args, *options.values()]
        for value in given:
            self._argument(value)
        # The sandbox wraps str.format.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str | bytes):
            self.grows(getattr(function, "__name__", ""), owner, given)

    def grows(self, name: str, text: Any, given: Sequence[Any]) -> None:
        """Before a method or filter that may return more than it was given."""
        first = given[0] if given else None
        if name == "replace" and len(given) > 1 and isinstance(text, str | bytes):
            times = text.count(first) if first else len(text) + 1
            self._fits(times * _length(given[1]) + len(text))
        elif name == "join":
            separator, items = (text, first) if isinstance(text, str | bytes) and first is not None else (first, text)
            self._fits(_weight(items, self._limits.size) + _length(separator) * _length(items))
        elif name in ("format", "format_map") and isinstance(text, str):
            self._format(text)
        elif name in ("indent", "expandtabs", "wordwrap"):
            self._fits(_length(text) * max([8, *map(_extent, given)]))
        elif name == "translate":
            raise Exhausted("the template uses translate(), which is not supported")

    def _argument(self, value: Any) -> None:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_NUMBER:
            raise Exhausted(f"the template passes a number beyond {LARGEST_NUMBER} to a function and was stopped")
        self._fits(_weight(value, self._limits.size))

    def _format(self, text: str) -> None:
        if _GROWING_FORMAT.search(text):
            raise Exhausted("the template formats with a width that is too large or not fixed and was stopped")

    def _fits(self, size: int) -> None:
        if size > self._limits.size:
            raise Exhausted(f"the template builds a value of more than {self._limits.size} elements and was stopped")

    def _fits_bits(self, bits: int) -> None:
        if bits > _BITS:
            raise Exhausted(f"the template computes a number of more than {_BITS} bits and was stopped")


def metered_filter(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """`function`, metered before and after; filters whose first argument is jinja's own are told by its attribute."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*args: Any, **options: Any) -> Any:
        given = [*args[first + 1 :], *options.values()]
        meter.call(None, given, {})
        meter.grows(name, args[first], given)
        return meter.value(function(*args, **options))

    return metered


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits_as_size(left.bit_length() + right.bit_length())
    count, other = (left, right) if isinstance(left, int) else (right, left)
    return _length(other) * abs(count) if isinstance(count, int) else 0


def _bits_as_size(bits: int) -> int:
    return 0 if bits <= _BITS else 1 << 62


def _extent(value: Any) -> int:
    return abs(value) if isinstance(value, int) else _length(value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _weight(value: Any, limit: int) -> int:
    """Characters and elements of a value written out in full, counted up to `limit`."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 1
    total, waiting = 0, [value]
    while waiting and total <= limit:
        for item in _items(waiting.pop()):
            total += _ELEMENT + (len(item) if isinstance(item, str | bytes) else 0)
            if isinstance(item, list | tuple | dict | set | frozenset):
                waiting.append(item)
            if total > limit:
                break
    return total


def _items(value: Any) -> Any:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value
