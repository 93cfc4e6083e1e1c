"""Who computes which tokens in the next step. Decodes first, then prefill in order of arrival; the newest gives way.

A step may be planned while the one before is in flight: its sequences count as one token longer, and what the host
learns later of them (an end, an error) only discards their rows. All steps run in the order of their launch, so a page
that falls free is rewritten by later steps alone, whatever is in flight; and a page is sealed only when the step that
filled it is committed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from minicpm_cli.engine.lockstep import Continued, Repetition
from minicpm_cli.engine.pages import DUMMY, PagePool
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import (
    SPECULATING,
    Drawn,
    EngineConfig,
    EngineRequest,
    Sequence,
    TokenEvent,
    answer_limit,
)
from minicpm_cli.engine.speculation import Price, Speculation, verified
from minicpm_cli.engine.stats import Stats
from minicpm_cli.errors import ContextOverflow, RequestError
from minicpm_cli.types import FinishReason, Logprob

new = tuple.__new__  # of a NamedTuple: half the time of its own, where there is one for every token


class Scheduler:
    """`running` is in order of arrival. Nothing here costs more than the number of running sequences a step.

    With `host_draws` the device itself can only take the likeliest token. Steps of up to `alike_rows` rows compute the
    same for each; None: nobody limits them.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab: int,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        *,
        host_draws: bool = False,
        price: Price | None = None,
        alike_rows: int | None = None,
    ) -> None:
        self.host_draws = host_draws
        self.speculation: Speculation | None = None
        if config.lookup and alike_rows != 1:
            self.speculation = Speculation(config, price or Price.on("cpu"), stats, alike_rows)
        self.config, self.vocab, self.stats, self.clock = config, vocab, stats, clock
        self.pool = PagePool(config.pages, config.page_size, config.prefix_cache)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._stuck = False  # the first in line did not fit, and nothing was freed since
        self._repetition = Repetition(config.page_size)
        self._hosted = 0  # requests

    @property
    def hosted(self) -> bool:
        """Whether any request's next step depends on what the host makes of its last token."""
        return self._hosted > 0

    @property
    def speculates(self) -> bool:
        """Whether the next step's rows depend on what the one in flight draws."""
        return self.speculation is not None and self.speculation.pays(self.running)

    @property
    def repeats(self) -> bool:
        """Whether the next step has the rows of the last one, whoever joins."""
        return self._repetition.goes_on

    @property
    def backlog(self) -> int:
        """Tokens of the sequences that wait for a seat."""
        return sum([len(seq.tokens) for seq in self.waiting])

    @property
    def live(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, request: EngineRequest) -> TokenEvent | None:
        """Puts a request in line, or says why it can never run."""
        self.stats.requests += 1
        try:
            self.waiting.append(self._sequence(request))
        except (RequestError, ContextOverflow) as error:
            self.stats.failed += 1
            return TokenEvent(request.id, finish="error", error=error)
        return None

    def plan(self) -> Plan:
        again = None if self._admits() else self._repetition.next(self.pool)
        plan = again or self._planned()
        self.stats.note_pages(self.pool.usable, self.pool.held, self.pool.idle)
        return plan

    def _planned(self) -> Plan:
        self._repetition.end()
        chunks: list[Chunk] = []
        preemptions = self.stats.preemptions
        budget = self._decodes(chunks, self.config.max_batch_tokens)
        for seq in self.running:
            if seq.remaining > 1:
                budget = self._chunk(seq, chunks, budget)
        if preemptions == self.stats.preemptions:
            self._admit(chunks, budget)
        plan = self.speculation.plan(chunks, self.pool) if self.speculation else Plan(chunks)
        if plan.decodes and (self.speculation is None or plan.rows > SPECULATING):
            self._repetition.begin(plan, self.running)
        return plan

    def commit(self, plan: Plan, drawn: Drawn) -> list[TokenEvent]:
        """The step is computed: its tokens are in the cache, `drawn` are those of `plan.sampled`, in order.

        Meanwhile a sequence may have ended, or lost its pages to another; the token drawn for it is then no less true.
        """
        if isinstance(plan, Continued) and self._repetition.holds(plan) and drawn.plain:
            return self._commit_repeated(plan, drawn.tokens)
        chunks = plan.chunks
        if plan.extra:
            chunks, drawn = verified(chunks, drawn)
        now, events, size, row, told = self.clock(), [], self.config.page_size, -1, 0
        for seq, start, count, sample in chunks:
            row += sample
            if seq.finished:
                continue
            if sample and row in drawn.errors:
                events.append(self._end(seq, "error", now, error=drawn.errors[row]))
                continue
            if seq.seated and (seq.sealed + 1) * size <= start + count:
                self._seal(seq, start + count)
            if sample:
                events.append(self._append(seq, drawn.tokens[row], drawn.logprobs.get(row), now))
                told += 1
        self.stats.generated_tokens += told
        if plan.extra and self.speculation:
            self.speculation.settle(plan)
        return events

    def _commit_repeated(self, plan: Continued, tokens: list[int]) -> list[TokenEvent]:
        """Nothing has happened to the sequences since it was planned. They are looked at one by one if one may end."""
        filled, now = dict(plan.filled()), self.clock()
        self.stats.generated_tokens += len(tokens)
        if not plan.lockstep.last_in(plan.number, tokens):
            for row, computed in filled.items():
                self._seal(plan.sampled[row], computed)
            return plan.lockstep.told(tokens)
        events = []
        for row, seq in enumerate(plan.sampled):
            if row in filled:
                self._seal(seq, filled[row])
            events.append(self._append(seq, tokens[row], None, now))
        return events

    def timed(self, plan: Plan, seconds: float) -> None:
        """How long a step took, from its launch to its tokens."""
        if self.speculation and plan.decodes:
            self.speculation.price.timed(plan.rows - plan.extra, plan.extra, seconds)

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> list[TokenEvent]:
        now = self.clock()
        return [self._end(seq, "error", now, error=error) for seq in list(sequences) if not seq.finished]

    def abort(self, ids: Collection[str]) -> list[TokenEvent]:
        """Ends all requests with these ids."""
        now = self.clock()
        gone = [seq for seq in (*self.running, *self.waiting) if seq.request.id in ids] if ids else []
        return [self._end(seq, "cancelled", now) for seq in gone]

    def reset(self) -> None:
        """Forgets all requests, from any state that an interrupt may leave. What was sealed stays cached."""
        for seq in (*self.running, *self.waiting):
            seq.finished = True
        self.running, self.waiting, self._stuck, self._hosted = [], deque(), False, 0
        self._repetition.end()
        self.pool.recover()

    def _sequence(self, request: EngineRequest) -> Sequence:
        seq = Sequence(request, answer_limit(request, self.config.limit, self.vocab), self.clock())
        seq.hosted |= self.host_draws and (seq.penalised or not seq.greedy)
        self._hosted += seq.hosted
        return seq

    def _decodes(self, chunks: list[Chunk], budget: int) -> int:
        size = self.config.page_size
        for seq in tuple(self.running):
            start = seq.planned
            if not (budget and seq.seated and start + 1 == seq.length < seq.limit):
                continue
            if start < len(seq.pages) * size or self._has_page(seq):
                chunks.append(new(Chunk, (seq, start, 1, True)))
                seq.planned, seq.length = start + 1, start + 2
                budget -= 1
        return budget

    def _has_page(self, seq: Sequence) -> bool:
        """A page for the next token, at the cost of the newest sequences. False: it was itself the newest."""
        while not self.pool.available:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is seq:
                return False
        seq.add_pages(self.pool.take(1, seq.pages[-1]))
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        self.waiting.appendleft(seq)
        self.stats.preemptions += 1

    def _admits(self) -> bool:
        """Whether the first in line may find a seat."""
        return bool(self.waiting) and len(self.running) < self.config.max_seqs and not self._stuck

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while budget and self._admits():
            seq = self.waiting[0]
            self._stuck = not self._seat(seq)
            if not self._stuck:
                self.waiting.popleft()
                self.running.append(seq)
                budget = self._chunk(seq, chunks, budget)

    def _seat(self, seq: Sequence) -> bool:
        """Gives `seq` the pages of all its tokens, cached ones first; at least one token is left to compute.

        A spare page for each running sequence must remain, lest the newcomer be preempted straight away.
        """
        size, length = self.config.page_size, len(seq.tokens)
        found = self.pool.match(seq.tokens, (length - 1) // size)
        need = -(-length // size) - len(found)
        if need + len(self.running) > self.pool.available:
            self.pool.drop(found)
            return False
        seq.add_pages(found + self.pool.take(need, found[-1] if found else DUMMY))
        seq.sealed, seq.seated = len(found), True
        seq.planned = len(found) * size
        if seq.cached is None:
            seq.cached, seq.started = seq.planned, self.clock()
            self.stats.prompt_tokens += seq.prompt_length
            self.stats.cached_tokens += seq.planned
        return True

    def _chunk(self, seq: Sequence, chunks: list[Chunk], budget: int) -> int:
        count = min(budget, seq.remaining)
        if count:
            sample = count == seq.remaining
            chunks.append(Chunk(seq, seq.planned, count, sample))
            seq.planned += count
            seq.length += sample
        return budget - count

    def _seal(self, seq: Sequence, computed: int) -> None:
        if seq.seal_pages(self.pool, computed):
            self._repetition.end()

    def _append(self, seq: Sequence, token: int, logprob: Logprob | None, now: float) -> TokenEvent:
        """Takes a drawn token in and sees whether it is the last one."""
        tokens, request = seq.tokens, seq.request
        tokens.append(token)
        if seq.first_token is None:
            seq.first_token = now
        if not seq.heard and len(tokens) < seq.end and token not in request.eos_ids:
            return new(TokenEvent, (request.id, token, logprob, None, None, None, None))
        try:
            finish = seq.verdict(token)
        except Exception as error:  # noqa: BLE001 - whatever a request's own sink or mask raises ends that request only
            return self._end(seq, "error", now, error=error)
        if finish is None:
            return new(TokenEvent, (request.id, token, logprob, None, None, None, None))
        return self._end(seq, finish, now, token, logprob)

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        now: float,
        token: int | None = None,
        logprob: Logprob | None = None,
        error: Exception | None = None,
    ) -> TokenEvent:
        if seq.seated:
            self._release(seq)
        else:
            self.waiting.remove(seq)
            self._stuck = False
        seq.finished = True
        self._hosted -= seq.hosted
        usage, timings = seq.usage(), seq.timings(now)
        self.stats.note_end(usage, timings)
        if error is not None:
            self.stats.failed += 1
            return TokenEvent(seq.request.id, None, None, "error", usage, timings, error)
        self.stats.cancelled += finish == "cancelled"
        self.stats.finished += finish != "cancelled"
        return TokenEvent(seq.request.id, token, logprob, finish, usage, timings)

    def _release(self, seq: Sequence) -> None:
        self._repetition.end()
        self.running.remove(seq)
        self.pool.drop(seq.pages)
        seq.clear_pages()
        seq.seated = self._stuck = False
