"""Tables that grow by rows: the first rows settle how wide the columns are, for those that come later too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.table import Table as Grid
from rich.text import Text

from minicpm_cli.chat.inline import inline
from minicpm_cli.chat.markdown import ROWS_TO_MEASURE
from minicpm_cli.chat.pieces import Table

if TYPE_CHECKING:
    from rich.console import Console

_BETWEEN = 3  # columns of the terminal between two of the table
_SPARE = 6  # columns that a cell of a later row may be wider, where there is room
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Columns:
    """How wide the text of each column is, and how much of that is spare."""

    widths: tuple[int, ...]
    spare: int

    @classmethod
    def measured(cls, table: Table) -> Columns:
        rows = table.rows[: 2 + ROWS_TO_MEASURE]
        widths = tuple(max(1, *(cell_len(inline(row[i]).plain) for row in rows)) for i in range(len(table.aligned)))
        return cls(widths, 0 if table.closes and len(table.rows) <= 1 + ROWS_TO_MEASURE else _SPARE)

    def rows(self, console: Console, table: Table, room: int) -> Iterator[Text]:
        """The rows of the terminal, no wider than `room` where that can be."""
        grid = Grid(box=box.SIMPLE_HEAD, show_header=table.opens, show_edge=False, pad_edge=False)
        header = table.rows[0] if table.opens else [""] * len(self.widths)
        for cell, width, aligned in zip(header, self._fitted(room), table.aligned, strict=True):
            grid.add_column(_cell(cell), justify=aligned, width=width, overflow="fold")  # type: ignore[arg-type]
        for row in table.rows[1:] if table.opens else table.rows:
            grid.add_row(*map(_cell, row))
        if table.rows:
            width = sum(self._fitted(room)) + _BETWEEN * len(self.widths)
            for line in console.render_lines(grid, console.options.update(width=width), pad=False):
                text = Text.assemble(*((part.text, part.style or "") for part in line))
                text.rstrip()
                yield text

    def _fitted(self, room: int) -> Sequence[int]:
        """The widths with what room there is to spare, or as much narrower as they must be, the widest first."""
        widths = list(self.widths)
        excess = sum(widths) + _BETWEEN * (len(widths) - 1) - room
        if excess < 0:
            spare = min(self.spare, -excess // len(widths))
            return [width + spare for width in widths]
        while excess > 0 and max(widths) > _LEAST:
            widest = widths.index(max(widths))
            widths[widest] -= 1
            excess -= 1
        return widths


def _cell(text: str) -> Text:
    return inline(text)
