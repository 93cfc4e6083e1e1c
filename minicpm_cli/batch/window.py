"""The requests that wait for the model, handed out so that neighbours share the longest prefix that the window offers.

The prefix cache then computes a common system prompt once, however its rows are mixed in the file and however small
the cache is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from minicpm_cli.batch.records import Row
from minicpm_cli.types import Request

UNIT = 32  # tokens: two pages of the cache; shorter prefixes are not worth another order


@dataclass(frozen=True, slots=True)
class Ready:
    """A row with its request and the bytes that it takes; `chain[i]` stands for the first (i + 1) * UNIT tokens."""

    row: Row
    request: Request
    size: int = 0
    chain: tuple[int, ...] = ()


def prefix_chain(ids: Sequence[int]) -> tuple[int, ...]:
    """Equal entries of two chains: equal prefixes (or a hash collision, which costs nothing but order)."""
    tokens, chain, link = array("I", ids), [], 0
    for start in range(0, len(tokens) - UNIT + 1, UNIT):
        link = hash((link, tokens[start : start + UNIT].tobytes()))
        chain.append(link)
    return tuple(chain)


@dataclass(slots=True)
class _Round:
    """Rows by arrival, and for each prefix those that begin with it."""

    rows: dict[int, Ready] = field(default_factory=dict)
    under: dict[int, dict[int, None]] = field(default_factory=dict)

    def add(self, number: int, ready: Ready) -> None:
        self.rows[number] = ready
        for link in ready.chain:
            self.under.setdefault(link, {})[number] = None

    def take(self, last: Sequence[int]) -> Ready:
        """The oldest of those that share most with `last`."""
        found = next((self.under[link] for link in reversed(last) if link in self.under), self.rows)
        number = next(iter(found))
        ready = self.rows.pop(number)
        for link in ready.chain:
            self.under[link].pop(number)
            if not self.under[link]:
                del self.under[link]
        return ready


class PrefixWindow:
    """At most `rows` requests, and no further one once they take `size` bytes.

    It goes by rounds: what arrives during a round belongs to the next. So no request is overtaken by more than two
    windows of others, and a common prefix that never ends starves nobody.
    """

    def __init__(self, rows: int = 512, size: int = 8 << 20) -> None:
        self._rows, self._size = rows, size
        self._now, self._next = _Round(), _Round()
        self._last: tuple[int, ...] = ()
        self._arrived = self._held = 0

    def __len__(self) -> int:
        return len(self._now.rows) + len(self._next.rows)

    @property
    def full(self) -> bool:
        return len(self) >= self._rows or self._held >= self._size

    def add(self, ready: Ready) -> None:
        self._arrived += 1
        self._held += ready.size
        self._next.add(self._arrived, ready)

    def take(self) -> Ready:
        """Raises LookupError when it is empty."""
        if not len(self):
            raise LookupError("the window is empty")
        if not self._now.rows:
            self._now, self._next = self._next, self._now
        ready = self._now.take(self._last)
        self._held -= ready.size
        self._last = ready.chain
        return ready
