"""Notices a model that goes in circles: the end of its text is the same words over and over."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

OnLoop = Literal["stop", "ignore"]
ON_LOOP: tuple[OnLoop, ...] = ("stop", "ignore")
_LEAST_BYTES = 600  # some 150 tokens: a rule, a row of zeros or a chorus is shorter
_LEAST_TIMES = 5
_MOST_BYTES = 6_000  # of the end of the text that are looked at: circles of up to 1,200 bytes
_STEP_BYTES = 200  # between two looks, each of which takes 2 ms
_SHOWN = 40
_BEGINNINGS = (
    re.compile(rb"\n(?=\S)"),
    re.compile(rb"[.!?]\s+(?=\S)|(?:\xe3\x80\x82|\xef\xbc[\x81\x9f])(?=[^\x80-\xbf])"),
    re.compile(rb"\s(?=\S)"),
    re.compile(rb"(?=[^\x80-\xbf])"),  # a character
    re.compile(rb""),
)


@dataclass(frozen=True, slots=True)
class Loop:
    """`text` came `times` times in a row, and nothing after it."""

    text: str
    times: int

    def __str__(self) -> str:
        words = " ".join(self.text.split()) or repr(self.text)
        shown = words if len(words) <= _SHOWN else words[:_SHOWN].rstrip() + "..."
        return f'"{shown}" came {self.times} times in a row'


@dataclass(slots=True)
class LoopWatch:
    """Hears the pieces of one text."""

    _tail: bytes = b""
    _new: int = field(default=0)

    def hear(self, text: str) -> Loop | None:
        """The loop that the text has run into, if any."""
        data = text.encode("utf-8", "surrogatepass")
        self._tail = (self._tail + data)[-_MOST_BYTES:]
        self._new += len(data)
        if self._new < _STEP_BYTES or len(self._tail) < _LEAST_BYTES:
            return None
        self._new = 0
        return repeated(self._tail)


def repeated(data: bytes) -> Loop | None:
    """The longest end of `data` that is one text over and over, long and often enough."""
    backwards = data[::-1]
    best = (0, 1)
    for length, period in enumerate(_periods(backwards), 1):
        if length >= max(_LEAST_BYTES, _LEAST_TIMES * period):
            best = (length, period)
    length, period = best
    if not length:
        return None
    return Loop(_whole(data[-2 * period :], period), length // period)


def _periods(data: bytes) -> list[int]:
    """Of each beginning of `data`, the shortest period (Knuth, Morris and Pratt's failure function)."""
    border = [0] * len(data)
    length = 0
    for i in range(1, len(data)):
        while length and data[i] != data[length]:
            length = border[length - 1]
        length += data[i] == data[length]
        border[i] = length
    return [i + 1 - border[i] for i in range(len(data))]


def _whole(twice: bytes, period: int) -> str:
    """What is repeated: from the beginning of a line on if there is one, else of a sentence, else of a word."""
    matches = (pattern.search(twice) for pattern in _BEGINNINGS)
    start = next(match.end() for match in matches if match and match.end() <= period)
    return twice[start : start + period].decode("utf-8", "replace")
