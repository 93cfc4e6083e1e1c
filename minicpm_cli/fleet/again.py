"""Requests whose worker has died. Whoever is to blame is found, and the others are answered.

A worker may die of anything; what ran on it is begun again among the others. What was there twice may have to do with
it: it is begun again apart from all others, in halves of those that were together. A half whose worker dies is halved
again, until a request is alone with a worker that dies: it alone is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from minicpm_cli.types import Request

_SUSPECT = 2  # deaths from which on a request is begun apart


class Again:
    """Of one stream. `waiting` has no worker yet; each of `groups` is to have one to itself."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.groups: deque[Sequence[Request]] = deque()
        self.deaths: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self.waiting or self.groups)

    def died(self, left: Sequence[Request], *, apart: bool) -> Request | None:
        """Takes what a worker left; `apart`: these alone were there. The one to give up, if it was alone."""
        self.deaths.update(request.id for request in left)
        if apart and len(left) == 1:
            return left[0]
        self.waiting.extend(request for request in left if self.deaths[request.id] < _SUSPECT)
        suspects = [request for request in left if self.deaths[request.id] >= _SUSPECT]
        half = (len(suspects) + 1) // 2
        self.groups.extend(group for group in (suspects[:half], suspects[half:]) if group)
        return None
