"""Marks that keep a message's text from passing for a control token, whatever a template does to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from minicpm_cli.errors import RequestError

_SIMPLE_TAG = re.compile(r"</?[A-Za-z_]+>")


class Marks:
    """Breaks up text for one set of control tokens.

    A mark goes behind every character that begins a control token, so none can be completed, be it by what the
    template writes next, by lower() or by replace(). Whole tags such as <b> that are no control token stay as they
    are, for templates that look for them. A text that begins with the end of a control token, or is a part of one,
    gets a mark before it.
    """

    def __init__(self, control: Iterable[str]) -> None:
        tokens = [token for token in control if token]
        self._folded = {token.casefold() for token in tokens}
        firsts = {variant for token in tokens for variant in (token[0], token[0].lower(), token[0].upper())}
        self._first = re.compile("|".join(map(re.escape, sorted(firsts)))) if firsts else None
        self._tails = tuple({token[cut:].lower() for token in tokens for cut in range(1, len(token))})
        self._insides = "\n".join(token[1:].lower() for token in tokens)
        self._longest = max(map(len, tokens), default=0)

    def choose(self, texts: Sequence[str]) -> str:
        """A character that is in none of the texts, nor its escaped form."""
        used = set().union(*map(set, texts))
        for mark in _candidates():
            if mark not in used and not any(escaped(mark) in text for text in texts):
                return mark
        raise RequestError("bad_parameter", "the messages use up the characters that mark control tokens in them")

    def break_up(self, text: str, mark: str) -> str:
        body = text.lstrip()
        start = body[: self._longest].lower()
        completes = start.startswith(self._tails) or (0 < len(body) < self._longest and start.rstrip() in self._insides)
        spaces = text[: len(text) - len(body)]
        if self._first is not None:
            body = self._first.sub(lambda found: self._broken(body, found, mark), body)
        return f"{spaces}{mark}{body}" if completes else spaces + body

    def break_word(self, text: str, mark: str) -> str:
        """As `break_up`, for names that a template may write with a capital: theirs comes behind the first letter."""
        broken = self.break_up(text, mark)
        if len(text) > 1 and text[0].isalnum() and broken[0] == mark:
            return broken[1] + mark + broken[2:].removeprefix(mark)
        return broken

    def _broken(self, text: str, found: re.Match[str], mark: str) -> str:
        tag = _SIMPLE_TAG.match(text, found.start())
        harmless = tag is not None and tag[0].casefold() not in self._folded
        return found[0] if harmless else found[0] + mark


def unmarked(text: str, mark: str) -> str:
    """`text` without its marks, also where a template wrote them as JSON escapes."""
    return text.replace(mark, "").replace(escaped(mark), "")


def escaped(mark: str) -> str:
    units = mark.encode("utf-16-be")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))


def _candidates() -> Iterator[str]:
    """Unicode's noncharacters, then a private area: neither is space, letter or digit, and neither has a case."""
    return map(chr, chain(range(0xFDD2, 0xFDF0), range(0xF0000, 0xFFFFE)))
