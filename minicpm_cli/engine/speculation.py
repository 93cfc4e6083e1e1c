"""Whether rows that verify expected tokens pay, and how many: their odds against what they cost.

A decode step gives a sequence a row for its last token and one for each expected token behind it. Every row draws with
the number of its own place: the tokens are those that steps of one row draw, where products of more rows round the
same. torch's packed and bf16 products on a CPU do; on a GPU those of as many rows as the decoder says (`alike_rows`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

from minicpm_cli.engine.lookup import Lookup
from minicpm_cli.engine.pages import PagePool
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import SPECULATING, Drawn, EngineConfig, Sequence
from minicpm_cli.engine.stats import Stats

WORTH = 1.05  # tokens in the time of one, at least
MEMORY = 8  # steps after which a step's time counts for a third
FORGET = 256  # plain steps after which a bad experience counts for a third
OUTLIER = 8.0  # a step that takes longer than this many times the expected does not count for more


@dataclass(slots=True)
class Price:
    """What steps cost, in plain steps of one row: `fixed` for verifying at all, `each` for a row.

    `scale` corrects a verifying step's price by what those before it took.
    """

    fixed: float
    each: float
    scale: float = 1.0
    plain: float = 0.0  # seconds of a plain step of one row; 0: not known

    @classmethod
    def on(cls, device: str) -> Price:
        """demo on 2 cores after 512 tokens: 2, 3, 5 and 8 rows take 1.1, 1.3, 2.2 and 2.7 times as long as one.

        MiniCPM-2B's shape in bf16 on an H200: a step of 8 rows takes 1.8 times as long as one, however many are used.
        It waits for the host, and stores and attends in two launches. Its own time decides from the first one on.
        """
        return cls(0.0, 0.25) if device == "cpu" else cls(0.75, 0.01)

    def of(self, rows: int, extra: int = 0) -> float:
        plain = 1 + self.each * (rows - 1)
        return (plain + self.fixed + self.each * extra) * self.scale if extra else plain

    def timed(self, rows: int, extra: int, seconds: float) -> None:
        """A step of `rows` sequences and `extra` rows took so long."""
        if not extra:
            of_one = seconds / self.of(rows)
            self.plain += (min(of_one, OUTLIER * self.plain) - self.plain) / MEMORY if self.plain else of_one
            self.scale += (1 - self.scale) / FORGET
        elif self.plain and seconds:
            expected = self.plain * self.of(rows, extra) / self.scale
            self.scale += (min(seconds / expected, OUTLIER) - self.scale) / MEMORY


class Speculation:
    """Up to `config.lookup` expected tokens a sequence, where that pays.

    Never more than `most` rows a step: with more, each would come out otherwise than in a step of its own.
    """

    def __init__(self, config: EngineConfig, price: Price, stats: Stats, most: int | None = None) -> None:
        self.config, self.price, self._stats = config, price, stats
        self._rows = min(config.max_batch_tokens, config.max_batch_tokens if most is None else most)

    def pays(self, seqs: Collection[Sequence]) -> bool:
        """Whether the next step should wait for the tokens of the one in flight, which may be a draft's."""
        return any(seq.draft for seq in seqs) or any(self.counts(seqs))

    def plan(self, chunks: list[Chunk], pool: PagePool) -> Plan:
        """The step of these chunks; if a few sequences decode and no more, with rows for what is expected to follow."""
        if not 0 < len(chunks) <= SPECULATING:
            return Plan(chunks)
        if not all(size == 1 and sample and start + 1 == len(seq.tokens) for seq, start, size, sample in chunks):
            return Plan(chunks)
        extra = self.draft([chunk.seq for chunk in chunks], pool)
        rows = [Chunk(seq, start + i, 1, True) for seq, start, _, _ in chunks for i in range(1 + len(seq.draft))]
        return Plan(rows, extra)

    def draft(self, seqs: list[Sequence], pool: PagePool) -> int:
        """Gives these sequences, whose last tokens are known, their drafts and the pages for them.

        No other sequence loses a page for it. Returns how many tokens were drafted.
        """
        for seq, count in zip(seqs, self.counts(seqs), strict=True):
            count = self._seated(seq, count, pool, spare=len(seqs)) if count else 0
            if count and seq.lookup:
                seq.draft = seq.lookup.draft(count)
                self._stats.drafts += 1
                self._stats.proposed_tokens += count
        return sum(len(seq.draft) for seq in seqs)

    def settle(self, plan: Plan) -> None:
        """After a step with drafts: what its sequences hold is known."""
        for seq, start, _, _ in plan.joined():
            if seq.draft and len(seq.tokens) > start + 2:
                self._stats.accepted_tokens += len(seq.tokens) - start - 2
            seq.draft = array("i")
            if not seq.finished:
                seq.planned, seq.length = len(seq.tokens) - 1, len(seq.tokens)

    def counts(self, seqs: Collection[Sequence]) -> list[int]:
        """How many tokens to draft for each of these: the likeliest first, as many as bring the most in a time."""
        counts = [0] * len(seqs)
        room = self._rows - len(seqs)
        if not 0 < len(seqs) <= SPECULATING:
            return counts
        odds = [(chance, place) for place, seq in enumerate(seqs) for chance in self._odds(seq)]
        odds = sorted(odds, key=lambda each: -each[0])[: max(room, 0)]
        tokens, best, kept = float(len(seqs)), WORTH * len(seqs) / self.price.of(len(seqs)), 0
        for extra, (chance, _) in enumerate(odds, 1):
            tokens += chance
            if (rate := tokens / self.price.of(len(seqs), extra)) > best:
                best, kept = rate, extra
        for _, place in odds[:kept]:
            counts[place] += 1
        return counts

    def _seated(self, seq: Sequence, count: int, pool: PagePool, spare: int) -> int:
        """Takes pages for `count` tokens behind the known ones, or counts those that fit the pages that are there."""
        known, size = len(seq.tokens), self.config.page_size
        need = -(-(known + count) // size) - len(seq.pages)
        if need > max(pool.available - spare, 0):
            return min(count, len(seq.pages) * size - known)
        if need > 0:
            seq.add_pages(pool.take(need, seq.pages[-1]))
        return count

    def _odds(self, seq: Sequence) -> list[float]:
        if not seq.foreseeable:
            return []
        if seq.lookup is None:
            seq.lookup = Lookup(seq.tokens)
        return seq.lookup.odds(min(self.config.lookup, seq.max_tokens - seq.generated - 1))


def verified(chunks: list[Chunk], drawn: Drawn) -> tuple[list[Chunk], Drawn]:
    """The rows that were given the right tokens: of a draft up to and with the first row that draws another one."""
    kept: list[int] = []
    last, right = -1, True
    for row, chunk in enumerate(chunks):
        place = chunk.start - len(chunk.seq.tokens)  # in the draft; -1 is the last known token's row
        right = place < 0 or (right and chunk.seq.draft[place] == last)
        last = drawn.tokens[row]
        if right:
            kept.append(row)
    return [chunks[row] for row in kept], drawn.rows(kept)
