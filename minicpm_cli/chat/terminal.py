"""The two streams of the terminal: the answer goes to stdout, everything else to stderr.

What comes from a model or a file is shown, never obeyed: on a terminal, control characters appear as pictures.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
DIM, RESET = "\x1b[2m", "\x1b[0m"


def neutral(text: str) -> str:
    """`text` without anything that a terminal obeys: C0 as Unicode's control pictures, the others as <U+XXXX>."""
    return _CONTROL.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


@dataclass(slots=True)
class Terminal:
    """`color` and `plain` are the user's wishes; nothing is coloured where a stream is not a terminal.

    What a model thinks is `folded` into one line.
    """

    out: TextIO
    err: TextIO
    color: bool = True
    plain: bool = False
    quiet: bool = False
    verbose: bool = False
    folded: bool = False

    @property
    def out_tty(self) -> bool:
        return self.out.isatty()

    @property
    def err_tty(self) -> bool:
        return self.err.isatty()

    @property
    def fancy(self) -> bool:
        """Whether markdown, colours and a live region may be used on stdout."""
        return self.out_tty and not self.plain

    @property
    def columns(self) -> int:
        """Of the window that stderr is; 80 where that is not known."""
        return _columns(self.err) or 80

    def answer(self, text: str) -> None:
        """A piece of the answer: byte for byte where it is piped."""
        self.out.write(neutral(text) if self.out_tty else text)
        self.out.flush()

    def thought(self, text: str) -> None:
        """A piece of the model's thinking, dimmed."""
        text = neutral(text) if self.err_tty else text
        self.err.write(f"{DIM}{text}{RESET}" if self.err_tty and self.color and not self.plain else text)
        self.err.flush()

    def note(self, text: str) -> None:
        """Something worth knowing; --quiet hides it."""
        if not self.quiet:
            self.line(f"minicpm: {text}")

    def detail(self, text: str) -> None:
        """Something that only --verbose shows."""
        if self.verbose:
            self.line(f"minicpm: {text}")

    def line(self, text: str) -> None:
        """A line on stderr that is always shown."""
        self.err.write((_wrapped(neutral(text), _columns(self.err)) if self.err_tty else text) + "\n")
        self.err.flush()


def _columns(stream: TextIO) -> int | None:
    """Of the window; None where that is not known."""
    with suppress(OSError, ValueError):  # no file, or one that is no terminal
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def _wrapped(text: str, columns: int | None) -> str:
    """Broken between words: a terminal breaks within them."""
    if columns is None or len(text.encode()) <= columns:
        return text
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(width=columns, file=io.StringIO()), columns)
    return "\n".join(line.plain.rstrip() for line in lines)
