"""How much of a device's memory the weights, a step's workspace and the cache take; decided before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from minicpm_cli.errors import OutOfMemory
from minicpm_cli.model.config import ModelConfig

GIB = 2**30
GPU_SEQS, GPU_TOKENS = 64, 8192
CPU_SEQS, CPU_TOKENS, CPU_CONTEXT = 4, 512, 8192
CPU_CACHE_SHARE = 0.25  # of free memory, unless a larger context is asked for: the machine is not ours alone
LEAST_CONTEXT = 512  # a smaller context than this, or the model's own, is not worth opening
LEAST_SEQ = 256  # tokens that each of the sequences asked for must have room for
SCORE_COPIES = 6  # float32 rows of logits alive at once while sampling: scores, weights, float64 sums, masks


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the user asked for; None leaves it to the plan. `fraction` of the free bytes may be used."""

    context: int | None = None
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    fraction: float = 0.9
    page_size: int = 16
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, `context` in tokens. `pages` includes the dummy. `problem` is empty when everything fits."""

    free: int
    budget: int
    weights: int
    workspace: int
    kv_per_token: int
    page_size: int
    pages: int
    context: int
    max_seqs: int
    max_batch_tokens: int
    problem: str = ""

    @property
    def cache(self) -> int:
        return self.pages * self.page_size * self.kv_per_token

    @property
    def cache_tokens(self) -> int:
        return max(self.pages - 1, 0) * self.page_size

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        return (
            f"fits: {_gib(self.total)} of {_gib(self.budget)}, {self.cache_tokens} tokens of cache for "
            f"{self.max_seqs} sequences of up to {self.context} tokens"
        )


def plan_memory(
    cfg: ModelConfig, *, weight_bytes: int, kv_itemsize: int, free_bytes: int, options: MemoryOptions
) -> MemoryPlan:
    """Sizes an engine for `free_bytes`, the memory that is free before the weights are loaded.

    Raises OutOfMemory when the model, or a context or number of sequences that was asked for, does not fit.
    """
    plan = survey_memory(
        cfg, weight_bytes=weight_bytes, kv_itemsize=kv_itemsize, free_bytes=free_bytes, options=options
    )
    if plan.problem:
        raise OutOfMemory(plan.problem)
    return plan


def survey_memory(
    cfg: ModelConfig, *, weight_bytes: int, kv_itemsize: int, free_bytes: int, options: MemoryOptions
) -> MemoryPlan:
    """The same plan, but what does not fit is told in `problem`."""
    cpu, size = options.cpu, options.page_size
    seqs = options.max_seqs or (CPU_SEQS if cpu else GPU_SEQS)
    tokens = max(options.max_batch_tokens or (CPU_TOKENS if cpu else GPU_TOKENS), seqs)
    kv_token = cfg.kv_bytes_per_token(kv_itemsize)
    work = workspace_bytes(cfg, tokens, seqs)
    budget = int(free_bytes * options.fraction)
    room = max((budget - weight_bytes - work) // (kv_token * size) - 1, 0)  # pages beside the dummy
    context = options.context or min(cfg.context, CPU_CONTEXT if cpu else cfg.context, max(room * size, 1))
    problem = _problem(cfg, weight_bytes + work, kv_token, budget, room * size, options)
    pages = min(room, seqs * -(-context // size))
    if cpu:
        share = int(free_bytes * CPU_CACHE_SHARE) // (kv_token * size)
        pages = min(pages, max(share, -(-context // size), seqs * -(-min(context, LEAST_SEQ) // size)))
    return MemoryPlan(free_bytes, budget, weight_bytes, work, kv_token, size, pages + 1, context, seqs, tokens, problem)


def workspace_bytes(cfg: ModelConfig, tokens: int, seqs: int) -> int:
    """An upper estimate of what a step allocates: the widest block's activations, and the rows of logits."""
    heads = cfg.heads * max(cfg.head_dim, cfg.mla.latent if cfg.mla else 0)
    active = cfg.moe.active if cfg.moe else 1
    per_token = 4 * (4 * cfg.hidden_size + 4 * heads + 3 * active * cfg.intermediate)
    return tokens * per_token + seqs * cfg.vocab * 4 * SCORE_COPIES


def _problem(cfg: ModelConfig, fixed: int, kv_token: int, budget: int, room_tokens: int, options: MemoryOptions) -> str:
    """What does not fit, by how much, and what would."""
    least = min(LEAST_CONTEXT, cfg.context)
    context = options.context or least
    wanted = max(context, (options.max_seqs or 1) * min(LEAST_SEQ, context))
    if wanted <= room_tokens:
        return ""
    need = fixed + (wanted + options.page_size) * kv_token
    what = "the model"
    if options.context and context == wanted:
        what = f"a context of {context} tokens"
    elif options.max_seqs and options.max_seqs > 1:
        what = f"{options.max_seqs} sequences at once"
    advice = (
        f"What would fit: a cache of {room_tokens} tokens; lower --ctx or --max-seqs, or raise --memory-fraction."
        if room_tokens >= least
        else "Not even a short conversation would fit: take a smaller model, --quantize, or another device."
    )
    return f"{what} does not fit: {_gib(need)} needed, {_gib(budget)} may be used. {advice}"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
