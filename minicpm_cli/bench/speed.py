"""The standard workloads, and how fast a runner of token ids does them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]
WARM_UPS = 2  # after one, the first run counted was still the slowest of a GPU's


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition. Seconds count from the moment the prompts were handed over."""

    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` sequences of `prompt` tokens, each continued greedily by `new` tokens whatever they are."""

    name: str
    batch: int
    prompt: int
    new: int
    rate: Callable[[Run], float]
    help: str

    @property
    def unit(self) -> str:
        return "tok/s"

    def prompts(self, seed: int, vocab: int) -> list[tuple[int, ...]]:
        """Random token ids: another seed shares no prefix."""
        draw = random.Random(seed)
        return [tuple(draw.randrange(vocab) for _ in range(self.prompt)) for _ in range(self.batch)]


def decode_rate(run: Run) -> float:
    """New tokens a second after the first."""
    return (run.new_tokens - 1) / (run.total_seconds - run.first_seconds)


def prefill_rate(run: Run) -> float:
    """Prompt tokens a second up to the first new token."""
    return run.prompt_tokens / run.first_seconds


def output_rate(run: Run) -> float:
    """New tokens of all sequences a second, their prompts' time included."""
    return run.new_tokens / run.total_seconds


_ALL = (
    Workload("decode", 1, 128, 256, decode_rate, "one sequence, 128 tokens continued by 256"),
    Workload("decode-long", 1, 2048, 256, decode_rate, "one sequence, 2048 tokens continued by 256"),
    Workload("prefill", 1, 512, 1, prefill_rate, "one prompt of 512 tokens until its first new token"),
    Workload("batch16", 16, 128, 128, output_rate, "16 sequences at once, 128 tokens continued by 128"),
    Workload("batch64", 64, 128, 128, output_rate, "64 sequences at once, 128 tokens continued by 128"),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}


class Runner(Protocol):
    """Whatever can continue token ids: our engine, or another one in the same process."""

    def run(self, prompts: list[tuple[int, ...]], new: int) -> Run: ...


def measure(runner: Runner, workload: Workload, *, vocab: int, repeats: int) -> tuple[float, ...]:
    """The rate of each of `repeats` runs, after those that warm up and do not count."""
    runs = [runner.run(workload.prompts(seed, vocab), workload.new) for seed in range(WARM_UPS + repeats)]
    return tuple(workload.rate(run) for run in runs[WARM_UPS:])
