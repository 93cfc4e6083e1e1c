"""Steps that repeat the one before, a place further: most steps of a batch, so they must cost the host little."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import repeat

from minicpm_cli.engine.pages import PagePool
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import Sequence, TokenEvent

new = tuple.__new__  # of a NamedTuple: half the time of its own, where there is one for every token


class Lockstep:
    """Sequences that decode side by side, a token each in every step, for as long as nothing else happens to any.

    Row i computed place `first[i]` in the step `begun`, whose number is 0, and computes the next one in each. The
    sequences themselves do not tell of these steps, in `planned` and `length`, until they `part`.
    """

    def __init__(self, begun: Plan, page_size: int) -> None:
        self.begun, self.page_size, self.number = begun, page_size, 0
        self.seqs: list[Sequence] = begun.sampled
        self.first = [seq.planned - 1 for seq in self.seqs]
        requests = [seq.request for seq in self.seqs]
        self._last = min(map(_left, self.seqs, self.first))
        self._ends = frozenset[int]().union(*{request.eos_ids for request in requests})
        self._heard = any(seq.heard for seq in self.seqs)
        self._ids = [request.id for request in requests]
        self._tokens = [seq.tokens for seq in self.seqs]
        self._rows: list[list[int]] = [[] for _ in range(page_size)]  # by where in a page their first place is
        for row, place in enumerate(self.first):
            self._rows[place % page_size].append(row)

    @property
    def goes_on(self) -> bool:
        """Whether none has been given all the tokens that it may get."""
        return self.number < self._last

    def turning(self, number: int) -> list[int]:
        """The rows whose place in that step is the first of a page."""
        return self._rows[-number % self.page_size]

    def next(self, pool: PagePool) -> Continued | None:
        """The next step. None: it is not for all of them, or there are too few pages."""
        turning = self.turning(self.number + 1)
        if not self.goes_on or len(turning) > pool.available:
            return None
        self.number += 1
        for row in turning:
            seq = self.seqs[row]
            if self.first[row] + self.number >= len(seq.pages) * self.page_size:
                seq.add_pages(pool.take(1, seq.pages[-1]))
        return Continued(self, self.number)

    def part(self) -> None:
        for seq, place in zip(self.seqs, self.first, strict=True):
            seq.planned = place + self.number + 1
            seq.length = seq.planned + 1

    def last_in(self, number: int, tokens: list[int]) -> bool:
        """Whether one of the tokens drawn in that step may be the last of its sequence: a sink or a mask decides."""
        return self._heard or number >= self._last or not self._ends.isdisjoint(tokens)

    def told(self, tokens: list[int]) -> list[TokenEvent]:
        """Takes the tokens in."""
        for known, token in zip(self._tokens, tokens, strict=True):
            known.append(token)
        none = repeat(None)
        events = zip(self._ids, tokens, none, none, none, none, none, strict=False)
        return list(map(new, repeat(TokenEvent), events))


class Continued(Plan):
    """A step of the sequences of the one before, in the same rows; what is the same is not worked out again."""

    def __init__(self, lockstep: Lockstep, number: int) -> None:
        begun = lockstep.begun
        self.lockstep, self.number = lockstep, number
        self.sampled, self.rows, self.tokens, self.decoding = begun.sampled, begun.rows, begun.tokens, begun.decoding
        self.extra, self.decodes, self.hosted, self.masked, self.kind = 0, True, begun.hosted, begun.masked, begun.kind

    def filled(self) -> Iterator[tuple[int, int]]:
        """The rows of which the step fills a page, and how many tokens of the sequence are computed with it."""
        for row in self.lockstep.turning(self.number + 1):
            yield row, self.lockstep.first[row] + self.number + 1

    @cached_property
    def chunks(self) -> list[Chunk]:
        first, number = self.lockstep.first, self.number
        return [Chunk(seq, start + number, 1, True) for seq, start in zip(self.sampled, first, strict=True)]


class Repetition:
    """The step that was planned last, while nothing has changed since: who runs, or which pages they had."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._begun: Plan | None = None
        self._lockstep: Lockstep | None = None

    def begin(self, plan: Plan, running: list[Sequence]) -> None:
        """With a step of nothing but decodes, if nobody was left out of it who may take part in the next."""
        if plan.rows and not plan.extra and plan.rows == sum([seq.length < seq.limit for seq in running]):
            self._begun = plan

    def end(self) -> None:
        """Before what has been planned of one of the sequences is looked at, or is no more."""
        if self._lockstep is not None:
            self._lockstep.part()
        self._begun = self._lockstep = None

    @property
    def goes_on(self) -> bool:
        return self._lockstep is not None and self._lockstep.goes_on

    def holds(self, plan: Continued) -> bool:
        """Whether nothing has changed since that step was planned."""
        return plan.lockstep is self._lockstep

    def next(self, pool: PagePool) -> Continued | None:
        """The step again, a place further, where that is what would be planned anew if nobody joins."""
        if self._begun is None:
            return None
        if self._lockstep is None:
            self._lockstep = Lockstep(self._begun, self.page_size)
        return self._lockstep.next(pool)


def _left(seq: Sequence, place: int) -> int:
    """How many steps after the one that computes `place` the sequence takes part in.

    The token drawn at a place is the next one's; the last that a sequence may get is not computed.
    """
    return min(seq.limit, seq.end) - place - 2
