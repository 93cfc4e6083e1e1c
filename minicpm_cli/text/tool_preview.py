"""What is certain of a call before it is whole: its name, then its arguments piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from minicpm_cli.types import Tool

# What the parsers of JSON and Python raise for texts that are none, or that nest too deeply.
FAILURES = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of this tool begins; what follows are its arguments."""

    name: str


T = TypeVar("T")
Said = Begun | str
Reading = Iterator[Said | None]  # None: nothing more before the text has grown
Steps = Generator[Said | None, None, T]  # of a reading


class Growing:
    """A block's text so far, from its opening tag on, and how far it is read."""

    def __init__(self, at: int) -> None:
        self.raw = ""
        self.at = at


class Preview:
    """Runs the reading of a format. One that finds something wrong says nothing more: the whole block decides then.

    What it says is the beginning of what the format makes of the whole, or the call is given up.
    """

    def __init__(
        self, read: Callable[[Growing, Mapping[str, Tool]], Reading], at: int, tools: Mapping[str, Tool]
    ) -> None:
        self._text = Growing(at)
        self._reading = read(self._text, tools)

    def read(self, raw: str) -> list[Said]:
        self._text.raw = raw
        said: list[Said] = []
        try:
            for piece in self._reading:
                if piece is None:
                    break
                said.append(piece)
        except FAILURES:
            self._reading = iter(())
        return said
