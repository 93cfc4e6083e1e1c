"""Where a row of the terminal may end: before spaces, and between the characters of scripts that write none."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

_HAN = (
    "\u2e80-\u2fff\u3000-\u30ff\u3100-\u312f\u31a0-\u31ff\u3200-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
    "\uffe0-\uffe6\U00020000-\U0003ffff"
)
_NEVER_FIRST = (
    "、。，．・：；？！％）］｝〉》」』】〕〗…—～’”ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
    r",.:;?!%)\]}·\u0300-\u036f\u3099\u309a\ufe00-\ufe0f\u200d"
)
_NEVER_LAST = r"（［｛〈《「『【〔〖‘“(\[{"
_BREAK = re.compile(
    rf"(?<=\S)(?=\s)|(?<=\n)(?=\S)|(?<=[{_HAN}])(?<![{_NEVER_LAST}])(?=[^\s{_NEVER_FIRST}])"
    rf"|(?<=\S)(?<![{_NEVER_LAST}])(?=[{_HAN}])(?![{_NEVER_FIRST}])"
)
_WIDE = re.compile(f"[{_HAN}]")


def breaks(text: str) -> Iterator[int]:
    """Places inside `text`, in order, where a row may end."""
    return (match.start() for match in _BREAK.finditer(text))


def atoms(text: str) -> Iterator[tuple[int, int]]:
    """The start and end of what stays on one row: spaces and the word after them; a line break is one alone."""
    return pairwise(
        [*({0} if text else ()), *(place for place in breaks(text) if place), *({len(text)} if text else ())]
    )


def doubtful(text: str) -> int:
    """How many characters there are of which terminals disagree how wide they are."""
    return 0 if text.isascii() else sum(not _certain(character) for character in text)


def _certain(character: str) -> bool:
    if character.isascii():
        return True
    wide, category = unicodedata.east_asian_width(character), unicodedata.category(character)
    return wide != "A" and category[0] != "M" and category != "Cf" and ord(character) < 0x1F000


def has_wide(text: str) -> bool:
    """Whether there is a character of a script without spaces."""
    return _WIDE.search(text) is not None
