"""The arithmetic of a measurement, with a clock and a runner whose answers are known."""

from __future__ import annotations

import pytest

from minicpm_cli.bench.speed import WORKLOADS, Run, Workload, decode_rate, measure, output_rate, prefill_rate


class CountingRunner:
    """Each run takes one second longer than the last."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, ...]]] = []

    def run(self, prompts: list[tuple[int, ...]], new: int) -> Run:
        self.seen.append(prompts)
        return Run(sum(map(len, prompts)), len(prompts) * new, 0.5, float(len(self.seen)))


def test_rates() -> None:
    run = Run(prompt_tokens=512, new_tokens=257, first_seconds=2.0, total_seconds=4.0)
    assert decode_rate(run) == 128.0
    assert prefill_rate(run) == 256.0
    assert output_rate(run) == 64.25


def test_the_first_two_runs_warm_up_and_do_not_count() -> None:
    runner = CountingRunner()
    workload = Workload("w", 2, 3, 10, output_rate, "")
    assert measure(runner, workload, vocab=50, repeats=3) == (20 / 3, 20 / 4, 20 / 5)


def test_no_two_runs_or_sequences_share_a_prompt() -> None:
    runner = CountingRunner()
    measure(runner, WORKLOADS["batch16"], vocab=1000, repeats=2)
    prompts = [prompt for run in runner.seen for prompt in run]
    assert len(set(prompts)) == (2 + 2) * 16
    assert {len(prompt) for prompt in prompts} == {128}
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_a_workload_is_the_same_everywhere() -> None:
    assert WORKLOADS["decode"].prompts(7, 1000) == WORKLOADS["decode"].prompts(7, 1000)


@pytest.mark.parametrize(
    ("name", "batch", "prompt", "new"),
    [
        ("decode", 1, 128, 256),
        ("decode-long", 1, 2048, 256),
        ("prefill", 1, 512, 1),
        ("batch16", 16, 128, 128),
        ("batch64", 64, 128, 128),
    ],
)
def test_the_standard_workloads(name: str, batch: int, prompt: int, new: int) -> None:
    workload = WORKLOADS[name]
    assert (workload.batch, workload.prompt, workload.new) == (batch, prompt, new)
