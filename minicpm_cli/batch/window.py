"""The requests that wait for the model, handed out so that neighbours share the longest prefix that the window offers.

The prefix cache then computes a common system prompt once, however its rows are mixed in the file and however small
the cache is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from minicpm_cli.batch.records import Row
from minicpm_cli.types import Request

UNIT = 32  # tokens: two pages of the cache; shorter prefixes are not worth another order
_WORTH_WAITING = 8  # units that are being computed for another request
_PATIENCE = 16  # steps of the engine, then what is being computed is not waited for
_KNOWN = 1 << 14  # units that are taken for computed


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

    def take(self, last: Sequence[int], may_go: Callable[[Ready], bool]) -> Ready | None:
        """The oldest of those that share most with `last`, among those that may go."""
        refused: set[int] = set()
        for number in self._by_prefix(last):
            if number not in refused:
                if may_go(self.rows[number]):
                    return self._out(number)
                refused.add(number)
        return None

    def _by_prefix(self, last: Sequence[int]) -> Iterator[int]:
        for link in reversed(last):
            yield from self.under.get(link, ())
        yield from self.rows

    def _out(self, number: int) -> Ready:
        ready = self.rows.pop(number)
        for link in ready.chain:
            self.under[link].pop(number)
            if not self.under[link]:
                del self.under[link]
        return ready


class _Computed:
    """Which prefixes the cache holds, and which are on their way there, as far as the requests' first tokens tell."""

    def __init__(self) -> None:
        self._known: dict[int, None] = {}
        self._coming: Counter[int] = Counter()

    def begin(self, chain: Sequence[int]) -> None:
        self._coming.update(chain)

    def end(self, chain: Sequence[int]) -> None:
        self._coming.subtract(chain)
        for link in chain:
            if self._coming[link] <= 0:
                del self._coming[link]
            self._known.pop(link, None)
            self._known[link] = None
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    def give_up(self) -> None:
        self._coming.clear()

    def is_free(self, ready: Ready) -> bool:
        """Whether it would not compute what another request is computing at this moment."""
        missing = islice((link for link in ready.chain if link not in self._known), _WORTH_WAITING)
        return sum(link in self._coming for link in missing) < _WORTH_WAITING


class PrefixWindow:
    """At most `rows` requests, and no further one once they take `size` bytes.

    It goes by rounds: what arrives during a round belongs to the next. So no request is overtaken by more than two
    windows of others, and a common prefix that never ends starves nobody. Of requests with a long common prefix the
    first goes alone: the others follow when it has been computed (or after some steps, if it takes too long).
    """

    def __init__(self, rows: int = 512, size: int = 8 << 20) -> None:
        self._rows, self._size = rows, size
        self._now, self._next = _Round(), _Round()
        self._last: tuple[int, ...] = ()
        self._computed = _Computed()
        self._arrived = self._held = self._waited = 0

    def __len__(self) -> int:
        return len(self._now.rows) + len(self._next.rows)

    @property
    def full(self) -> bool:
        return len(self) >= self._rows or self._held >= self._size

    def add(self, ready: Ready) -> None:
        self._arrived += 1
        self._held += ready.size
        self._next.add(self._arrived, ready)

    def take(self) -> Ready | None:
        """None when it is empty, or when each request waits for what another one computes."""
        if not self._now.rows:
            self._now, self._next = self._next, self._now
        is_free = self._computed.is_free
        ready = self._now.take(self._last, is_free) or self._next.take(self._last, is_free)
        if ready is None:
            self._waited += 1
            if self._waited >= _PATIENCE:
                self.hurry()
            return None
        self._waited = 0
        self._computed.begin(ready.chain)
        self._held -= ready.size
        self._last = ready.chain
        return ready

    def computed(self, chain: Sequence[int]) -> None:
        """A request that was taken has its first token, or has ended without one."""
        self._computed.end(chain)

    def hurry(self) -> None:
        """Nothing is waited for that is being computed now."""
        self._waited = 0
        self._computed.give_up()
