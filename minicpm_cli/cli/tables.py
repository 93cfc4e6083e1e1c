"""Rows for people at a terminal, tab-separated lines for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from minicpm_cli.chat.terminal import Terminal

NONE = "-"  # an empty cell
_FOLDED = 4  # columns that fold in a narrow window; of more, nothing could be read, or copied, any more


def show_records(
    terminal: Terminal,
    records: Any,  # what --json prints, for programs
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    as_json: bool,
) -> None:
    """The answer of a command that lists things: as JSON where that was asked for, else as a table."""
    if as_json:
        terminal.out.write(json.dumps(records, ensure_ascii=False, indent=2) + "\n")
    else:
        show_table(terminal, header, rows)


def show_table(terminal: Terminal, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """On stdout. Tabs and newlines inside a cell become spaces where the lines are for programs."""
    if terminal.fancy:
        _draw(terminal, header, rows)
        return
    for row in (header, *rows):
        terminal.out.write("\t".join(" ".join(cell.split("\t")).replace("\n", " ") for cell in row) + "\n")


def _draw(terminal: Terminal, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table, listed = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False), list(rows)
    for row in listed:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))  # the end of a path is the part that counts
    console = Console(file=terminal.out, no_color=not terminal.color, highlight=False)
    whole = console.measure(table, options=console.options.update(width=10_000)).maximum
    if len(header) <= _FOLDED or whole <= console.width:
        console.print(table)
        return
    for name, *cells in listed:
        told = ", ".join(f"{what} {cell}" for what, cell in zip(header[1:], cells, strict=True) if cell != NONE)
        console.print(Text(name), Padding(Text(told), (0, 0, 0, 2), expand=False), sep="\n")
