"""What is not finished, shown behind what is: never more than the rest of one row, so that it can be erased again.

Where the window became too narrow for that, it stays as it is, and the text goes on behind it.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from minicpm_cli.chat.markdown import Blocks
    from minicpm_cli.chat.rendering import Page


class Echo:
    """`of` gives what to write; `erase` takes it back, if the row still holds it."""

    def __init__(self) -> None:
        self.count = 0  # characters of the text that are shown
        self._cells = 0
        self._end = 0  # the column behind it, or more than that

    def of(self, blocks: Blocks, page: Page) -> str:
        rows = page.rows
        room = 0 if rows.wrapped else rows.width - 1 - rows.column - rows.doubtful
        margin = "" if blocks.code_indent is None else page.margin(blocks.code_indent)
        if blocks.rows:
            shown, self.count = f"... {blocks.rows} rows", 0
            shown = shown if len(shown) <= room else ""
        else:
            text = _beginning(blocks.waiting, room - len(margin))
            shown, self.count = margin + text if text else "", len(text)
        self._cells = cell_len(shown)
        self._end = rows.column + rows.doubtful + self._cells
        return shown

    def erasable(self, columns: int) -> bool:
        return self._end < columns

    def erase(self) -> str:
        cells, self._cells, self.count = self._cells, 0, 0
        return f"\x1b[{cells}D\x1b[K" if cells else ""

    @property
    def shown(self) -> bool:
        return self._cells > 0


def doubtful(text: str) -> int:
    """How many characters there are of which terminals disagree how wide they are."""
    return 0 if text.isascii() else sum(not _certain(character) for character in text)


def _beginning(text: str, room: int) -> str:
    """As much of `text` as has `room`, before the first character of a doubtful width."""
    used = 0
    for place, character in enumerate(text):
        used += 1 if character.isascii() else cell_len(character)
        if used > room or not _certain(character):
            return text[:place]
    return text


def _certain(character: str) -> bool:
    if character.isascii():
        return character.isprintable()
    wide, category = unicodedata.east_asian_width(character), unicodedata.category(character)
    return wide != "A" and category[0] != "M" and category != "Cf" and ord(character) < 0x1F000
