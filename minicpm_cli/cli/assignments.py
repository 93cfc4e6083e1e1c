"""`--option=value` where a shell completes it: bash hands over three words, zsh and fish one; typer expects two.

In zsh and fish, what is offered must then begin with `--option=`, or be said to come after it.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout

_COMPLETE = "_MINICPM_COMPLETE"
_WORDS, _AT, _LINE = "COMP_WORDS", "COMP_CWORD", "_TYPER_COMPLETE_ARGS"
_LAST = re.compile(r"(?<=\s)(--[\w-]+)=([^\s'\"]*)$")


@contextmanager
def as_two_words(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Within this context the variables in which a shell asks have `--option value` instead."""
    shell = environ.get(_COMPLETE, "").removeprefix("complete_")
    if shell == "bash" and environ.get(_AT, "").isdecimal():
        words, at = rejoined(environ.get(_WORDS, "").split("\n"), int(environ[_AT]))
        environ[_WORDS], environ[_AT] = "\n".join(words), str(at)
    last = _LAST.search(environ.get(_LINE, "")) if shell in ("zsh", "fish") else None
    if last is None:
        yield
        return
    environ[_LINE] = f"{environ[_LINE][: last.start()]}{last[1]} {last[2]}"
    offered, out = io.StringIO(), sys.stdout
    try:
        with redirect_stdout(offered):
            yield
    finally:
        out.write(_after(last[1], offered.getvalue(), shell))


def rejoined(words: list[str], at: int) -> tuple[list[str], int]:
    """The words without the "=" behind an option, and where the one that is completed stands then."""
    kept: list[str] = []
    place = at
    for number, word in enumerate(words):
        if word == "=" and kept and kept[-1].startswith("--"):
            if number == at:
                kept.append("")
            elif number < at:
                place -= 1
        else:
            kept.append(word)
    return kept, place


def _after(option: str, offered: str, shell: str) -> str:
    if shell == "zsh":
        return f"compset -P '*='; {offered}"
    return "".join(f"{option}={line}" for line in offered.splitlines(keepends=True) if line.strip())
