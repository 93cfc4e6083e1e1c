"""How short an answer may be: until then its end is no token that may come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minicpm_cli.text.bitmask import put
from minicpm_cli.types import FinishReason, TokenMask


class AtLeast:
    """A TokenMask: none of `ends` among the first `count` tokens, thinking included; `other` is asked as well."""

    def __init__(self, count: int, ends: Iterable[int], other: TokenMask | None = None) -> None:
        self._left, self._ends, self._other = count, tuple(ends), other

    def fill(self, row: Any) -> None:
        if self._other is not None:
            self._other.fill(row)
        if self._left > 0:
            for token in self._ends:
                put(row, token, allowed=False)

    def accept(self, token: int) -> FinishReason | None:
        self._left -= 1
        return None if self._other is None else self._other.accept(token)
