"""The standard workloads, and how fast a runner of token ids does them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from minicpm_cli.types import SamplingParams

Clock = Callable[[], float]
WARM_UPS = 2  # after one, the first run counted was still the slowest of a GPU's


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition. Seconds count from the moment the prompts were handed over.

    `host_seconds` are those of all decoding `steps` in which the host worked rather than waited; None where nobody
    counts them. What the host launches for a prompt takes the device longer to compute.
    """

    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    total_seconds: float
    steps: int = 0
    host_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` sequences of `prompt` tokens, each continued by `new` tokens whatever they are.

    `most` limits the repetitions that count, `warm` the sequences of those that do not; `host` names the row that the
    host's time makes.
    """

    name: str
    batch: int
    prompt: int
    new: int
    rate: Callable[[Run], float]
    unit: str
    help: str
    temperature: float = 0.0
    top_p: float = 1.0
    most: int | None = None
    warm: int | None = None
    warm_ups: int = WARM_UPS
    host: str | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.new)

    def prompts(self, seed: int, vocab: int, count: int | None = None) -> list[tuple[int, ...]]:
        """Random token ids: another seed or workload shares no prefix, which the engine would find in its cache.

        The first `count` alone, if it is given.
        """
        draw = random.Random(f"{self.name} {seed}")
        return [tuple(draw.choices(range(vocab), k=self.prompt)) for _ in range(min(self.batch, count or self.batch))]

    def sized(self, requests: int | None) -> Workload:
        """With another number of sequences, which makes it another workload."""
        if requests in (None, self.batch):
            return self
        assert requests is not None
        told = self.help.replace(str(self.batch), str(requests))
        return replace(self, name=f"{self.name}-{requests}", batch=requests, help=told)


def decode_rate(run: Run) -> float:
    """New tokens a second after the first."""
    return (run.new_tokens - 1) / (run.total_seconds - run.first_seconds)


def output_rate(run: Run) -> float:
    """New tokens of all sequences a second, their prompts' time included."""
    return run.new_tokens / run.total_seconds


def first_ms(run: Run) -> float:
    """Milliseconds until the first token."""
    return 1e3 * run.first_seconds


def host_ms(run: Run) -> float:
    """Milliseconds of the host's work a step."""
    assert run.host_seconds is not None
    return 1e3 * run.host_seconds / run.steps


RATE, MS = "tok/s", "ms"
_ALL = (
    Workload("decode", 1, 128, 256, decode_rate, RATE, "one sequence, 128 tokens continued by 256", host="host1"),
    Workload("decode-long", 1, 2048, 256, decode_rate, RATE, "one sequence, 2048 tokens continued by 256"),
    Workload("ttft128", 1, 128, 1, first_ms, MS, "a prompt of 128 tokens until its first new token"),
    Workload("ttft2048", 1, 2048, 1, first_ms, MS, "a prompt of 2048 tokens until its first new token"),
    Workload("batch16", 16, 512, 128, output_rate, RATE, "16 sequences at once, 512 tokens continued by 128"),
    Workload(
        "batch64", 64, 512, 128, output_rate, RATE, "64 sequences at once, 512 tokens continued by 128", host="host64"
    ),
    Workload(
        "throughput", 1024, 512, 256, output_rate, RATE, "1024 requests, 512 tokens continued by 256 that are drawn",
        temperature=0.8, top_p=0.8, most=1, warm=128, warm_ups=1,
    ),
)  # fmt: skip
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _ALL})
HOSTS = tuple(workload.host for workload in _ALL if workload.host)


class Runner(Protocol):
    """Whatever can continue token ids: our engine, or another one in the same process."""

    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        """Each prompt continued by `params.max_tokens` tokens."""
        ...


def measure(runner: Runner, workload: Workload, *, vocab: int, repeats: int) -> list[Run]:
    """`repeats` runs, after those that warm up and do not count."""
    for seed in range(workload.warm_ups):
        runner.run(workload.prompts(seed, vocab, workload.warm), workload.params)
    seeds = range(workload.warm_ups, workload.warm_ups + min(repeats, workload.most or repeats))
    return [runner.run(workload.prompts(seed, vocab), workload.params) for seed in seeds]
