"""The arithmetic of a measurement, with a clock and a runner whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minicpm_cli.bench.speed import WORKLOADS, Run, Workload, decode_rate, first_ms, host_ms, measure, output_rate
from minicpm_cli.types import SamplingParams


class CountingRunner:
    """Each run takes one second longer than the last."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, ...]]] = []
        self.asked: list[SamplingParams] = []

    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        self.seen.append(prompts)
        self.asked.append(params)
        return Run(sum(map(len, prompts)), len(prompts) * (params.max_tokens or 0), 0.5, float(len(self.seen)))


def test_rates() -> None:
    run = Run(prompt_tokens=512, new_tokens=257, first_seconds=2.0, total_seconds=4.0, steps=8, host_seconds=0.016)
    assert decode_rate(run) == 128.0
    assert first_ms(run) == 2000.0
    assert output_rate(run) == 64.25
    assert host_ms(run) == 2.0


def test_the_first_two_runs_warm_up_and_do_not_count() -> None:
    runner = CountingRunner()
    workload = Workload("w", 2, 3, 10, output_rate, "tok/s", "")
    assert [run.total_seconds for run in measure(runner, workload, vocab=50, repeats=3)] == [3.0, 4.0, 5.0]


def test_a_long_workload_warms_up_with_a_part_of_it_and_is_done_once() -> None:
    runner = CountingRunner()
    workload = replace(WORKLOADS["throughput"], batch=20, warm=4)
    (run,) = measure(runner, workload, vocab=50, repeats=3)
    assert [len(prompts) for prompts in runner.seen] == [4, 20]
    assert run.new_tokens == 20 * 256
    assert {(p.temperature, p.top_p, p.max_tokens) for p in runner.asked} == {(0.8, 0.8, 256)}


def test_no_two_runs_or_sequences_share_a_prompt() -> None:
    runner = CountingRunner()
    measure(runner, WORKLOADS["batch16"], vocab=1000, repeats=2)
    prompts = [prompt for run in runner.seen for prompt in run]
    assert len(set(prompts)) == (2 + 2) * 16
    assert {len(prompt) for prompt in prompts} == {512}
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_a_workload_is_the_same_everywhere() -> None:
    assert WORKLOADS["decode"].prompts(7, 1000) == WORKLOADS["decode"].prompts(7, 1000)


@pytest.mark.parametrize(
    ("name", "batch", "prompt", "new"),
    [
        ("decode", 1, 128, 256),
        ("decode-long", 1, 2048, 256),
        ("ttft128", 1, 128, 1),
        ("ttft2048", 1, 2048, 1),
        ("batch16", 16, 512, 128),
        ("batch64", 64, 512, 128),
        ("throughput", 1024, 512, 256),
    ],
)
def test_the_standard_workloads(name: str, batch: int, prompt: int, new: int) -> None:
    workload = WORKLOADS[name]
    assert (workload.batch, workload.prompt, workload.new) == (batch, prompt, new)


def test_no_two_workloads_share_the_beginning_of_a_prompt() -> None:
    first = {workload.prompts(3, 50_000, 1)[0][:16] for workload in WORKLOADS.values()}
    assert len(first) == len(WORKLOADS)
