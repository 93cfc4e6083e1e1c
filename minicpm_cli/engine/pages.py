"""Which page of the cache belongs to whom, and which full pages serve again for a prompt that begins the same."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

from minicpm_cli.engine.stretches import Stretches

DUMMY = 0  # never handed out: padded rows of a step may read and write it
ROOT = -1  # the parent of a first page
AHEAD = 16  # one page in so many may be evicted before it must be, for the sake of consecutive ones
Key = tuple[int, bytes]  # (parent page, the page's token ids as int32)


class PagePool:
    """Pages are free, held (by one or more sequences) or idle (held by nobody, but their content is known).

    A sealed page is found by its key, the page before it and its own tokens; both are compared whole, so that two
    different beginnings never meet. Whoever holds a page holds the pages before it, and pages become idle from the
    last one to the first: so the least recently used idle page never has a sealed page after it, and evicting it
    leaves no page whose parent is gone.
    """

    def __init__(self, pages: int, page_size: int, caching: bool = True) -> None:
        if pages < 2 or page_size < 1:
            raise ValueError(f"{pages} pages of {page_size} tokens: one page is the dummy, so at least 2 are needed")
        self.pages, self.page_size, self.caching = pages, page_size, caching
        self._free = Stretches(range(DUMMY + 1, pages))
        self._refs = [0] * pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def usable(self) -> int:
        return self.pages - 1

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def held(self) -> int:
        return self.usable - self.available

    def match(self, tokens: array[int], limit: int) -> list[int]:
        """The longest run of at most `limit` sealed pages that `tokens` begin with; the caller now holds them."""
        found, parent, size = [], ROOT, self.page_size
        for start in range(0, limit * size, size):
            page = self._index.get((parent, tokens[start : start + size].tobytes()))
            if page is None:
                break
            found.append(page)
            parent = page
        for page in found:
            self._hold(page)
        return found

    def take(self, count: int, after: int = DUMMY) -> list[int]:
        """`count` pages of unknown content, held by the caller. There must be so many available.

        Those that follow the page `after`, which the caller holds, or other consecutive ones, if such are free.
        """
        assert 0 <= count <= self.available, (count, self.available)
        if count == 1:
            return [self._one(after)]
        pages = self._run(count, after) if count else []
        if not pages:
            return sorted([self._one(after) for _ in range(count)])
        for page in pages:
            self._refs[page] = 1
        return pages

    def _one(self, after: int) -> int:
        page = self._free.take(after + 1) if self._free else self._evict()
        self._refs[page] = 1
        return page

    def _run(self, count: int, after: int) -> list[int]:
        """Consecutive free pages. If there are none, pages are evicted until there are, or too many for nothing."""
        pages = self._free.take_from(after + 1, count) or self._free.take_run(count)
        while not pages and self._idle and len(self._free) < count + self.pages // AHEAD:
            pages = self._free.take_from(self._free.add(self._evict()), count)
        return pages

    def seal(self, page: int, parent: int, tokens: bytes) -> int:
        """Makes a full, computed page findable. Returns the page to use from now on.

        That is another one when the same content is sealed already: the caller then holds that one instead of its own.
        `parent` is the page before, as `seal` or `match` returned it.
        """
        if not self.caching:
            return page
        key = (parent, tokens)
        known = self._index.get(key)
        if known is None:
            self._keys[page] = key
            self._index[key] = page
            return page
        self._hold(known)
        self.drop((page,))
        return known

    def drop(self, pages: Sequence[int]) -> None:
        """The caller holds these pages, a sequence's in order, no more."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.add(page)

    def forget(self) -> None:
        """What nobody holds is not found any more."""
        while self._idle:
            self._free.add(self._evict())

    def recover(self) -> None:
        """Forgets all holders. Trusts the index alone, so it also mends what an interrupted call left half done."""
        children: dict[int, list[int]] = defaultdict(list)
        for (parent, _), page in self._index.items():
            children[parent].append(page)
        order, stack = [], [ROOT]
        while stack:
            below = children[stack.pop()]
            order += below
            stack += below
        reachable = set(order)
        self._index = {key: page for key, page in self._index.items() if page in reachable}
        self._keys = {page: key for key, page in self._index.items()}
        self._refs = [0] * self.pages
        self._idle = OrderedDict.fromkeys(reversed(order))
        self._free = Stretches(page for page in range(DUMMY + 1, self.pages) if page not in self._keys)

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        held = {page for page in range(self.pages) if self._refs[page]}
        free, idle, sealed = set(self._free), set(self._idle), set(self._keys)
        assert len(free) == len(self._free), "a page is free twice"
        assert free | idle | held == set(range(1, self.pages)), "a page is lost, or the dummy is in use"
        assert len(free) + len(idle) + len(held) == self.usable, "a page is in two states"
        assert min(self._refs) >= 0
        assert idle <= sealed <= idle | held, "idle pages are sealed, free ones are not"
        assert self._index == {key: page for page, key in self._keys.items()}
        place = {page: i for i, page in enumerate(self._idle)}
        for page, (parent, _) in self._keys.items():
            assert parent == ROOT or parent in sealed, "a sealed page whose parent is gone"
            if parent != ROOT:
                assert self._refs[parent] >= self._refs[page], "who holds a page holds its parent"
                assert parent not in idle or place[page] < place[parent], "a parent would be evicted before its child"

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self._refs[page] += 1

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._index[self._keys[page]]
        del self._keys[page]
        return page
