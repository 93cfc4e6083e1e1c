"""A request on its way through the engine, and the events that tell of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from minicpm_cli.engine.lookup import Lookup
from minicpm_cli.engine.pages import ROOT, PagePool
from minicpm_cli.errors import ContextOverflow, RequestError
from minicpm_cli.types import FinishReason, Logprob, SamplingParams, Timings, TokenMask, TokenSink, Usage

SPECULATING = 4  # sequences at once; with more the weights are used well without


def most_rows(max_seqs: int, lookup: int) -> int:
    """Of decoding sequences and their drafts in a step."""
    return max(max_seqs, min(max_seqs, SPECULATING) * (1 + lookup))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of an engine. `pages` includes the dummy; a step computes at most `max_batch_tokens` tokens.

    With `lag` a step is planned and launched before the tokens of the one before are known to the host; None: wherever
    the device is not the CPU. `graphs` captures the decode steps of a GPU. Up to `lookup` tokens that a sequence is
    expected to repeat are verified in a step.
    """

    pages: int
    max_seqs: int
    max_batch_tokens: int
    context: int
    page_size: int = 16
    prefix_cache: bool = True
    graphs: bool = True
    lag: bool | None = None
    lookup: int = 0

    def __post_init__(self) -> None:
        if min(self.max_seqs, self.max_batch_tokens, self.context, self.page_size) < 1 or self.pages < 2:
            raise ValueError(f"an engine needs at least one seat, token, position and usable page: {self}")

    @property
    def rows(self) -> int:
        """The most rows of decoding sequences and their drafts in a step."""
        return most_rows(self.max_seqs, self.lookup)

    @property
    def limit(self) -> int:
        """The longest that a sequence may grow, in tokens."""
        return min(self.context, (self.pages - 1) * self.page_size)


@dataclass(slots=True)
class EngineRequest:
    """A prompt of token ids. The draws depend on `seed` alone; `eos_ids` end the answer."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    sink: TokenSink | None = None
    mask: TokenMask | None = None


def answer_limit(request: EngineRequest, limit: int, vocab: int) -> int:
    """How many tokens the answer may have, of a sequence that may have `limit`. Raises if it can never run."""
    length, wanted = len(request.prompt), request.params.max_tokens
    if not length:
        raise RequestError("missing_prompt", "the prompt is empty: give it at least one token")
    if length + (1 if wanted is None else wanted) > limit:
        raise ContextOverflow(length, 1 if wanted is None else wanted, limit)
    if min(request.prompt) < 0 or max(request.prompt) >= vocab:
        raise RequestError(
            "bad_parameter",
            f"the prompt holds a token id outside 0..{vocab - 1}: tokenizer and model do not belong together",
        )
    return limit - length if wanted is None else wanted


class TokenEvent(NamedTuple):
    """A token of a request. The last event of a request carries `finish`, `usage` and `timings`.

    The token of a cancelled or failed request's last event is None. An end token comes as a token too.
    """

    id: str
    token: int | None = None
    logprob: Logprob | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Drawn:
    """What sampling says of a step's rows: their tokens; by row, what was asked beside, or why there is no token."""

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return not self.logprobs and not self.errors

    def rows(self, kept: list[int]) -> Drawn:
        """Of these rows alone."""
        logprobs = {place: self.logprobs[row] for place, row in enumerate(kept) if row in self.logprobs}
        errors = {place: self.errors[row] for place, row in enumerate(kept) if row in self.errors}
        return Drawn([self.tokens[row] for row in kept], logprobs, errors)


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; those that were computed have keys in `pages`.

    At `end` tokens the answer has as many as it may. `length` also counts the tokens in flight: drawn by a step that
    was launched, not yet known here. The steps launched compute the first `planned` of them. The first `sealed` pages
    are in the prefix cache. `run` is the first page while all pages are consecutive, else -1; `version` counts the
    changes of `pages`. `row` is where the last step that was launched draws the next token. A `hosted` request needs
    the host between its steps, a `masked` one before each draw; a `heard` one tells a sink or a mask. `draft` is what a
    step in flight takes to follow `tokens`; what it drew says how far that is right.
    """

    request: EngineRequest
    max_tokens: int
    arrived: float
    tokens: array[int] = field(init=False)
    length: int = field(init=False)
    end: int = field(init=False)
    limit: int = field(init=False)
    prompt_length: int = field(init=False)
    penalised: bool = field(init=False)
    hosted: bool = field(init=False)
    masked: bool = field(init=False)
    heard: bool = field(init=False)
    greedy: bool = field(init=False)
    foreseeable: bool = field(init=False)
    lookup: Lookup | None = None
    draft: array[int] = field(default_factory=lambda: array("i"))
    pages: array[int] = field(default_factory=lambda: array("i"))
    run: int = -1
    version: int = 0
    row: int = 0
    planned: int = 0
    sealed: int = 0
    cached: int | None = None
    seated: bool = False
    finished: bool = False
    started: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        params = self.request.params
        self.tokens = array("i", self.request.prompt)
        self.prompt_length = self.length = len(self.tokens)
        self.end = self.prompt_length + self.max_tokens
        self.limit = max(self.end, self.prompt_length + 1)
        self.penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.greedy = params.temperature == 0 or params.top_k == 1 or params.top_p == 0
        self.hosted = params.logprobs is not None or bool(params.logit_bias)
        self.masked = self.request.mask is not None
        self.heard = bool(self.request.sink or self.request.mask)
        self.foreseeable = not self.hosted and not self.masked and not self.penalised

    @property
    def remaining(self) -> int:
        """Tokens that no step was launched for: 1 when it is decoding."""
        return self.length - self.planned

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def fed(self, place: int) -> int:
        """The token that a step is given at a place; 0: one in flight, which the device knows."""
        known = len(self.tokens)
        if place < known:
            return self.tokens[place]
        return self.draft[place - known] if self.draft else 0

    def drawn_before(self, computed: int) -> int:
        """Which of the request's draws follows its first `computed` tokens."""
        return computed - self.prompt_length

    def add_pages(self, pages: list[int]) -> None:
        self.version += 1
        for page in pages:
            if not self.pages:
                self.run = page
            elif page != self.pages[-1] + 1:
                self.run = -1
            self.pages.append(page)

    def seal_pages(self, pool: PagePool, computed: int) -> bool:
        """Seals the pages that the first `computed` tokens fill. True: others took the place of some."""
        size, version = pool.page_size, self.version
        while (self.sealed + 1) * size <= computed:
            place, start = self.sealed, self.sealed * size
            parent = self.pages[place - 1] if place else ROOT
            self._swap_page(place, pool.seal(self.pages[place], parent, self.tokens[start : start + size].tobytes()))
            self.sealed = place + 1
        return self.version != version

    def _swap_page(self, place: int, page: int) -> None:
        if page != self.pages[place]:
            self.version += 1
            self.pages[place] = page
            self.run = page if len(self.pages) == 1 else -1

    def clear_pages(self) -> None:
        self.version += 1
        self.pages, self.run = array("i"), -1
        self.planned = self.sealed = 0

    def verdict(self, token: int) -> FinishReason | None:
        """Tells the sink and the mask of a token. The end token itself is not part of the text."""
        request = self.request
        if token in request.eos_ids:
            return "stop"
        finish = request.sink.push(token) if request.sink else None
        if finish is None and request.mask:
            finish = request.mask.accept(token)
        if finish is None and len(self.tokens) >= self.end:
            return "length"
        return finish

    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.generated, self.cached or 0)

    def timings(self, now: float) -> Timings:
        """Seconds since the engine saw the request; what has not happened took until now."""
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return Timings(started - self.arrived, first - self.arrived, now - self.arrived)
