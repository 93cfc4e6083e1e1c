"""One key of a TOML text set or removed, every other line left as it is: comments, order and spacing are the user's.

It knows keys of the root and of a table with a header. The caller compares what the result means with what it should.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

Table = tuple[str, ...]  # the words of a header; () is the root


@dataclass(frozen=True, slots=True)
class _Statement:
    """Lines `begin` to `end` of the text; `key` is None for a table's header."""

    table: Table
    key: str | None
    begin: int
    end: int


def assign(text: str, table: Table, key: str, literal: str) -> str:
    """`text` with `key` of `table` set to `literal`, in its place or else after the table's other keys."""
    lines = _lines(text)
    statements = list(_statements(lines))
    line = f"{key} = {literal}\n"
    if (there := _find(statements, table, key)) is not None:
        lines[there.begin : there.end] = [line]
    elif (inside := [s for s in statements if s.table == table]) or not table:
        place = inside[-1].end if inside else _above_headers(lines, statements)
        lines[place:place] = [line] if inside or place == len(lines) else [line, "\n"]
    else:
        lines += ["\n"] * bool(lines) + [f"[{'.'.join(table)}]\n", line]
    return "".join(lines)


def remove(text: str, table: Table, key: str) -> str:
    """`text` without `key` of `table`; the same text where that is not there."""
    lines = _lines(text)
    there = _find(list(_statements(lines)), table, key)
    if there is not None:
        del lines[there.begin : there.end]
    return "".join(lines)


def _lines(text: str) -> list[str]:
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop().removesuffix("\n")
    return lines + [f"{last}\n"] * bool(last)


def _find(statements: list[_Statement], table: Table, key: str) -> _Statement | None:
    return next((s for s in statements if s.table == table and s.key and s.key.replace("-", "_") == key), None)


def _above_headers(lines: list[str], statements: list[_Statement]) -> int:
    """The place of the root's first key: before the first header and the comment that belongs to it."""
    place = statements[0].begin if statements else len(lines)
    while statements and place and lines[place - 1].startswith("#"):
        place -= 1
    return place


def _statements(lines: list[str]) -> Iterator[_Statement]:
    """Of a valid document. A value may span lines: they are taken together until they are TOML."""
    table: Table = ()
    at = 0
    while at < len(lines):
        begin, stripped = at, lines[at].strip()
        at += 1
        if not stripped or stripped.startswith("#"):
            continue
        if stripped.startswith("["):
            table = tuple(_path(lines[begin]))
            yield _Statement(table, None, begin, at)
            continue
        while (found := _keys("".join(lines[begin:at]))) is None and at < len(lines):
            at += 1
        yield _Statement(table, next(iter(found)) if found else None, begin, at)


def _keys(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _path(header: str) -> Iterator[str]:
    inside: object = _keys(header)
    while isinstance(inside, dict) and inside:
        name, inside = next(iter(inside.items()))
        yield name
