"""Rows of the terminal that only ever grow: words are appended, and a row ends where the next word has no room."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len, chop_cells
from rich.text import Text

from minicpm_cli.chat.breaks import atoms, doubtful

_LEAST = 8  # columns for text, whatever its indentation asks for


class Rows:
    """Text goes in, `take` gives what is to be appended. `column` is where the cursor will stand then.

    A row that the terminal had to wrap itself, since a word was longer than it, is `wrapped`: where the cursor stands
    in it is known only as long as the width stays.
    """

    def __init__(self) -> None:
        self.column = 0
        self.width = 80
        self.wrapped = False
        self.doubtful = 0  # characters in this row of which terminals disagree how wide they are
        self._out: list[Text] = []
        self._prefix = Text()  # before what goes on in the next row
        self._begun = False  # whether this row holds more than its prefix
        self._code = False  # whether this row holds code
        self._fresh = True  # whether it is the first of a line of the text, whose spaces count

    def take(self) -> Text:
        out, self._out = Text.assemble(*self._out), []
        return out

    def resize(self, width: int) -> None:
        """Ends the row where the window became too narrow for it: what a terminal does then, nobody knows."""
        before, self.width = self.width, width
        if (
            width != before
            and self.column
            and not self._code
            and (self.wrapped or self.column + self.doubtful >= width)
        ):
            self.new_row()

    def begin(self, first: Text, rest: Text) -> None:
        """A paragraph, with `first` before it and `rest` before its other rows."""
        self._prefix = rest
        self._append(_cut(first, self.width - _LEAST))
        self._begun, self._fresh = False, True

    def new_row(self) -> None:
        self.end()
        self._append(_cut(self._prefix, self.width - _LEAST))
        self._begun = False

    def end(self) -> None:
        """Ends the row, or makes an empty one."""
        self._out.append(Text("\n"))
        self.column, self.doubtful, self.wrapped = 0, 0, False
        self._begun = self._fresh = self._code = False

    def close(self) -> None:
        """Ends the paragraph."""
        self.end()
        self._prefix = Text()

    def write(self, text: Text) -> None:
        """Whole words. Spaces where a row ends are left out, those at the beginning of a paragraph's line are not."""
        for start, stop in atoms(text.plain):
            lines = text.plain.count("\n", start, stop)
            for _ in range(lines):
                self.new_row()
                self._fresh = True
            self._word(text[max(start, text.plain.rfind("\n", start, stop) + 1) : stop])

    def line(self, text: Text) -> None:
        """A row of its own."""
        self._append(text)
        self.end()

    def code(self, text: Text) -> None:
        """More of a line that the terminal wraps, so that it can be copied as one. No window ends it before its end."""
        self._append(text)
        self._code = True

    def _word(self, atom: Text) -> None:
        word = atom[len(atom.plain) - len(atom.plain.lstrip()) :]
        if not self._begun and not self._fresh:
            atom = word
        if self.column + cell_len(atom.plain) <= self.width:
            self._append(atom)
            return
        if self._begun:
            self.new_row()
        room = self.width - self.column
        if cell_len(word.plain) <= room:
            self._append(word)
        elif word.plain.isascii():
            self._append(word)
            self.column, self.wrapped = (self.column - 1) % self.width + 1, True
        else:
            self._chopped(word, room)

    def _chopped(self, word: Text, room: int) -> None:
        for number, part in enumerate(_parts(word, max(room, 2))):
            if number:
                self.new_row()
            self._append(part)

    def _append(self, text: Text) -> None:
        if text:
            self._out.append(text)
            self.column += cell_len(text.plain)
            self.doubtful += doubtful(text.plain)
            self._begun = True


def _cut(text: Text, cells: int) -> Text:
    return text if cell_len(text.plain) <= cells else Text(" " * max(0, min(cells, 2)))


def _parts(word: Text, cells: int) -> Iterator[Text]:
    start = 0
    for part in chop_cells(word.plain, cells):
        yield word[start : start + len(part)]
        start += len(part)
