"""How much of a device's memory the weights, a step's workspace and the cache take; decided before anything loads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minicpm_cli.engine.memory_workspace import PLAIN, Form, Workspace, ends_bytes, step_bytes, workspace
from minicpm_cli.engine.sequence import most_rows
from minicpm_cli.errors import OutOfMemory, UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.units import size

GPU_SEQS = (256, 128, 64)  # the most for which the cache has SEAT tokens each, at least the last
SEAT, GPU_TOKENS = 512, 8192
CPU_SEQS, CPU_TOKENS, CPU_CONTEXT = 4, 512, 8192
CPU_CACHE_SHARE = 0.25  # of free memory, unless a larger context is asked for: the machine is not ours alone
LEAST_CONTEXT = 512  # a smaller context than this, or the model's own, is not worth opening
LEAST_SEQ = 256  # tokens that each of the sequences asked for must have room for
MOST_SEQS = 1 << 16  # where a search for the largest batch ends


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be held: the model, its weights in bytes, and the bytes of a token in its cache."""

    cfg: ModelConfig
    weights: int
    kv_token: int
    form: Form = PLAIN


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the user asked for; None leaves it to the plan. `fraction` of the free bytes may be used.

    `graphs`: decode steps are captured. `fixed`: bytes that the device's context will take. `lookup`: tokens that each
    of a few sequences may have verified in a step.
    """

    context: int | None = None
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    fraction: float = 0.9
    page_size: int = 16
    cpu: bool = False
    graphs: bool = False
    fixed: int = 0
    lookup: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, `context` in tokens. `pages` includes the dummy. `problem` is empty when everything fits.

    `largest_context` is that of one sequence, `largest_batch` of sequences of `context` tokens each.
    """

    form: Form
    free: int
    budget: int
    fixed: int
    weights: int
    ends: int
    phases: Workspace
    kv_per_token: int
    page_size: int
    pages: int
    context: int
    max_seqs: int
    max_batch_tokens: int
    largest_context: int
    largest_batch: int
    problem: str = ""

    @property
    def workspace(self) -> int:
        return self.phases.running

    @property
    def cache(self) -> int:
        return self.pages * self.page_size * self.kv_per_token

    @property
    def cache_tokens(self) -> int:
        return max(self.pages - 1, 0) * self.page_size

    @property
    def total(self) -> int:
        return self.fixed + self.weights + self.workspace + self.cache

    @property
    def peaks(self) -> dict[str, int]:
        """What each phase takes at its most, the context left out."""
        held = self.weights + self.cache + self.phases.capture
        peaks = {"load": max(self.weights + self.phases.load, 2 * self.ends)}
        if self.phases.capture:
            peaks["capture"] = held + self.phases.decode
        return peaks | {"prefill": held + self.phases.prefill, "decode": held + self.phases.decode}

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        return (
            f"fits: {size(self.total)} of {size(self.budget)}, {self.cache_tokens} tokens of cache for "
            f"{self.max_seqs} sequences of up to {self.context} tokens"
        )


def plan_memory(demand: Demand, free_bytes: int, options: MemoryOptions) -> MemoryPlan:
    """Sizes an engine for `free_bytes`, the memory that is free before the weights are loaded.

    Raises OutOfMemory when the model, or a context or number of sequences that was asked for, does not fit, and
    UsageError for more sequences than tokens of a step.
    """
    plan = survey_memory(demand, free_bytes, options)
    if plan.problem:
        raise OutOfMemory(plan.problem)
    return plan


def survey_memory(demand: Demand, free_bytes: int, options: MemoryOptions) -> MemoryPlan:
    """The same plan, but what does not fit is told in `problem`."""
    _check_sizes(options)
    cfg, page = demand.cfg, options.page_size
    budget = int(free_bytes * options.fraction)
    seqs = options.max_seqs or _seats(demand, budget, options)
    tokens = _tokens(options, seqs)
    room = _room(demand, budget, tokens, seqs, options)
    context = options.context or min(cfg.context, CPU_CONTEXT if options.cpu else cfg.context, max(room, 1))
    pages = min(room // page, seqs * -(-context // page))
    if options.cpu:
        share = int(free_bytes * CPU_CACHE_SHARE) // (demand.kv_token * page)
        pages = min(pages, max(share, -(-context // page), seqs * -(-min(context, LEAST_SEQ) // page)))
    return MemoryPlan(
        form=demand.form,
        free=free_bytes,
        budget=budget,
        fixed=options.fixed,
        weights=demand.weights,
        ends=ends_bytes(cfg, demand.form.itemsize),
        phases=_workspace(demand, tokens, seqs, options),
        kv_per_token=demand.kv_token,
        page_size=page,
        pages=pages + 1,
        context=context,
        max_seqs=seqs,
        max_batch_tokens=tokens,
        largest_context=_room(demand, budget, max(tokens // seqs, 1) if options.cpu else tokens, 1, options),
        largest_batch=_largest_batch(demand, budget, tokens, min(context, cfg.context), options),
        problem=_problem(demand, budget, room, tokens, seqs, options),
    )


def _check_sizes(options: MemoryOptions) -> None:
    tokens, seqs = options.max_batch_tokens, options.max_seqs
    if tokens and seqs and tokens < seqs:
        raise UsageError(
            f"a step of {tokens} tokens (--max-batch-tokens) has not one for each of {seqs} sequences (--max-seqs): "
            f"give --max-batch-tokens {seqs} or more, or --max-seqs {tokens} or less"
        )


def _tokens(options: MemoryOptions, seqs: int) -> int:
    return max(options.max_batch_tokens or (CPU_TOKENS if options.cpu else GPU_TOKENS), seqs)


def _seats(demand: Demand, budget: int, options: MemoryOptions) -> int:
    """Where nobody says how many sequences may run at once; no more than the tokens that were asked for a step."""
    enough = (n for n in GPU_SEQS if _room(demand, budget, _tokens(options, n), n, options) >= n * SEAT)
    seats = CPU_SEQS if options.cpu else next(enough, GPU_SEQS[-1])
    return min(seats, options.max_batch_tokens or seats)


def what_would_fit(cfg: ModelConfig, tokens: int, seqs: int, free: int, form: Form = PLAIN) -> str:
    """For a step that the device had no memory for: the sizes of a step that `free` bytes would do for, as advice."""
    need = step_bytes(cfg, tokens, seqs, form)
    lower = next((n for n in _halves(tokens) if n >= seqs and step_bytes(cfg, n, seqs, form) <= free), 0)
    fewer = next((n for n in _halves(seqs) if step_bytes(cfg, n, n, form) <= free), 0)
    told = f"The step needs about {size(need)}, {size(free)} are free."
    if lower:
        return f"{told} What would fit: --max-batch-tokens {lower}."
    if fewer:
        return f"{told} What would fit: --max-seqs {fewer} with --max-batch-tokens {fewer}."
    return (
        f"{told} Not even one token would fit: give the cache less (a smaller --ctx or --memory-fraction), "
        "or close other programs that use the device."
    )


def _halves(count: int) -> list[int]:
    """count / 2, count / 4, ... 1."""
    return [count >> shift for shift in range(1, count.bit_length())]


def _workspace(demand: Demand, tokens: int, seqs: int, options: MemoryOptions) -> Workspace:
    rows = min(most_rows(seqs, options.lookup), tokens)
    return workspace(demand.cfg, tokens, rows, demand.form, graphs=options.graphs)


def _room(demand: Demand, budget: int, tokens: int, seqs: int, options: MemoryOptions) -> int:
    """Tokens of cache in whole pages, beside the dummy."""
    work = _workspace(demand, tokens, seqs, options)
    taken = options.fixed + max(
        demand.weights + max(work.running, work.load), 2 * ends_bytes(demand.cfg, demand.form.itemsize)
    )
    return max((budget - taken) // (demand.kv_token * options.page_size) - 1, 0) * options.page_size


def _largest_batch(demand: Demand, budget: int, tokens: int, context: int, options: MemoryOptions) -> int:
    """Sequences of `context` tokens each that fit at once."""
    pages = -(-max(context, 1) // options.page_size) * options.page_size
    low, high = 0, MOST_SEQS
    while low < high:
        middle = (low + high + 1) // 2
        fits = _room(demand, budget, max(tokens, middle), middle, options) >= middle * pages
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _problem(demand: Demand, budget: int, room: int, tokens: int, seqs: int, options: MemoryOptions) -> str:
    """What does not fit, by how much, and what would."""
    least = min(LEAST_CONTEXT, demand.cfg.context)
    context = options.context or least
    wanted = max(context, (options.max_seqs or 1) * min(LEAST_SEQ, context))
    if wanted <= room:
        return ""
    work = _workspace(demand, tokens, seqs, options).running
    need = options.fixed + demand.weights + work + (wanted + options.page_size) * demand.kv_token
    what = "the model"
    if options.context and context == wanted:
        what = f"a context of {context} tokens"
    elif options.max_seqs and options.max_seqs > 1:
        what = f"{options.max_seqs} sequences at once"
    advice = _advice(demand, budget, room, options)
    return f"{what} does not fit: {size(need)} needed, {size(budget)} may be used. {advice}"


def _advice(demand: Demand, budget: int, room: int, options: MemoryOptions) -> str:
    least = min(LEAST_CONTEXT, demand.cfg.context)
    if room >= least:
        return f"What would fit: a cache of {room} tokens; lower --ctx or --max-seqs, or raise --memory-fraction."
    narrow = _room(demand, budget, LEAST_SEQ, 1, replace(options, graphs=False))
    if narrow >= least:
        return (
            f"What would fit: a cache of {narrow} tokens with --max-seqs 1 --max-batch-tokens {LEAST_SEQ}; "
            "or raise --memory-fraction."
        )
    return "Not even a short conversation would fit: take a smaller model, --quantize, or another device."
