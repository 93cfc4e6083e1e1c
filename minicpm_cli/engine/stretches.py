"""Free pages as stretches of consecutive ones: attention reads a prompt faster whose pages are one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

TRIES = 8  # stretches of about the length that is asked for, before a longer one is cut
PIECE = 16  # pages that are cut off at once for those who take one at a time


class Stretches:
    """Runs come off the beginning of stretches that are long enough, single pages off the ends of short ones."""

    def __init__(self, pages: Iterable[int] = ()) -> None:
        """Of pages in ascending order."""
        self.clear()
        start = stop = -1
        for page in pages:
            if page != stop:
                self._put(start, stop)
                start = page
            stop = page + 1
        self._put(start, stop)
        self._count = sum(stop - start for start, stop in self._stops.items())

    def clear(self) -> None:
        self._count = 0  # of all pages
        self._loose: list[int] = []  # cut off, the next one last
        self._stops: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # by where they stop
        self._sizes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(64)
        ]  # starts, by the bits of the length

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        yield from self._loose
        for start, stop in self._stops.items():
            yield from range(start, stop)

    def add(self, page: int) -> int:
        """Joins a page with those beside it. Returns where the stretch starts that it is part of now."""
        start, stop = self._starts.get(page, page), self._stops.get(page + 1, page + 1)
        if start < page:
            self._pull(start)
        if stop > page + 1:
            self._pull(page + 1)
        self._put(start, stop)
        self._count += 1
        return start

    def take(self, wanted: int = -1) -> int:
        """A page, the one that is wanted if a stretch starts with it. There must be one."""
        self._count -= 1
        if wanted in self._stops:
            self._put(wanted + 1, self._pull(wanted))
            return wanted
        if not self._loose:
            start = next(next(iter(sizes)) for sizes in self._sizes if sizes)
            stop = self._pull(start)
            cut = max(stop - PIECE, start)
            self._put(start, cut)
            self._loose = list(range(stop - 1, cut - 1, -1))
        return self._loose.pop()

    def take_from(self, start: int, count: int) -> list[int]:
        """So many pages from the beginning of a stretch; none if there is no such stretch, or it is shorter."""
        if self._stops.get(start, start) - start < count:
            return []
        stop = self._pull(start)
        self._put(start + count, stop)
        self._count -= count
        return list(range(start, start + count))

    def take_run(self, count: int) -> list[int]:
        """So many consecutive pages, of a stretch of about that length; none if there is none of at least that."""
        bits = count.bit_length()
        for start in islice(self._sizes[bits], TRIES):
            if self._stops[start] - start >= count:
                return self.take_from(start, count)
        return next((self.take_from(next(iter(sizes)), count) for sizes in self._sizes[bits + 1 :] if sizes), [])

    def _put(self, start: int, stop: int) -> None:
        if start < stop:
            self._stops[start], self._starts[stop] = stop, start
            self._sizes[(stop - start).bit_length()][start] = None

    def _pull(self, start: int) -> int:
        stop = self._stops.pop(start)
        del self._starts[stop], self._sizes[(stop - start).bit_length()][start]
        return stop
