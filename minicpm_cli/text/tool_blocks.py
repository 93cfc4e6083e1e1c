"""Where a tool call that comes in pieces ends: an ending tag inside a quoted value is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Span(Protocol):
    """The inside of a quoted value."""

    def close(self, raw: str, at: int) -> tuple[bool, int]:
        """Whether it ends in `raw`, looked for from `at` on, and where to read on."""
        ...


class Quoted:
    """A string literal. One in single characters also ends with its line, as in Python: a stray ' is no string."""

    def __init__(self, mark: str, *, ends_with_line: bool = False) -> None:
        line = "|\n" if ends_with_line else ""
        self._pattern = re.compile(rf"\\.|({re.escape(mark)}{line})", re.DOTALL)
        self._hold = max(len(mark), 2) - 1

    def close(self, raw: str, at: int) -> tuple[bool, int]:
        for found in self._pattern.finditer(raw, at):
            at = found.end()
            if found[1]:
                return True, at
        return False, max(at, len(raw) - self._hold)


class Cdata:
    """A CDATA section ends only where the parameter does or the next section begins: templates escape no ]]> inside."""

    _spaces = re.compile(r"\s*")
    _after = ("</param>", "<![CDATA[")

    def close(self, raw: str, at: int) -> tuple[bool, int]:
        while (found := raw.find("]]>", at)) >= 0:
            behind = self._spaces.match(raw, found + 3).end()  # type: ignore[union-attr]
            rest = raw[behind : behind + len(self._after[1])]
            if rest.startswith(self._after):
                return True, found + 3
            if any(after.startswith(rest) for after in self._after):
                return False, found
            at = found + 1
        return False, max(at, len(raw) - 2)


@dataclass(frozen=True, slots=True)
class Tags:
    """What a call begins and ends with; `spans`: how quoted values begin, and what they are then."""

    open: str
    close: str
    spans: Mapping[str, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forced:
    """An answer that must call: how the prompt begins it, what follows, and how it ends then.

    What follows has a JSON schema, or `rules` (see `minicpm_cli.text.tool_rules`).
    """

    begun: str = ""
    schema: str | None = None
    rules: str | None = None
    ended: str = ""


class Block:
    """A call from its opening tag on. `plain`: quoted values are not looked for, since they did not end."""

    def __init__(self, tags: Tags, *, plain: bool = False) -> None:
        self.raw = tags.open
        self._tags = tags
        self._spans = {} if plain else tags.spans
        texts = sorted([tags.open, tags.close, *self._spans], key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._texts, self._hold = texts, len(texts[0]) - 1
        self._at = len(tags.open)
        self._span: Span | None = None
        self.ended = self.reopened = False

    def feed(self, text: str) -> str | None:
        """What is behind the block; None while it goes on. Another opening tag ends it, too, and is left to read."""
        self.raw += text
        while True:
            if self._span is not None:
                closed, self._at = self._span.close(self.raw, self._at)
                if not closed:
                    return None
                self._span = None
            found = self._pattern.search(self.raw, self._at)
            if found is None or self._may_grow(found):
                self._at = found.start() if found else max(self._at, len(self.raw) - self._hold)
                return None
            if found[0] in (self._tags.open, self._tags.close):
                return self._end(found)
            self._span, self._at = self._spans[found[0]], found.end()

    def _may_grow(self, found: re.Match[str]) -> bool:
        tail = self.raw[found.start() :]
        return len(tail) < self._hold + 1 and any(t != found[0] and t.startswith(tail) for t in self._texts)

    def _end(self, found: re.Match[str]) -> str:
        self.ended = found[0] == self._tags.close
        self.reopened = not self.ended
        place = found.end() if self.ended else found.start()
        rest, self.raw = self.raw[place:], self.raw[:place]
        return rest
