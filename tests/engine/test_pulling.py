"""Requests are pulled as steps have use for them: what a source does for each goes on while the device computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_cases import GREEDY, answers, engine_of, expected, prompt, request, run_checked

from minicpm_cli.engine.engine import WAITING
from minicpm_cli.engine.sequence import EngineRequest

COUNT, BUDGET = 70, 64


@pytest.mark.parametrize(("tokens", "first"), [(32, WAITING), (4, WAITING), (2, BUDGET // 2), (1, BUDGET)])
def test_no_more_than_fill_a_step(tokens: int, first: int) -> None:
    """But so many that a cache may know most of each."""
    engine, _ = engine_of(700, max_batch_tokens=BUDGET, max_seqs=COUNT)
    pulled, steps = 0, list[int]()
    launch = engine.runner.launch

    def source() -> Iterator[EngineRequest]:
        nonlocal pulled
        for i in range(COUNT):
            pulled += 1
            yield request(f"r{i}", prompt(tokens, i), GREEDY)

    def watched(plan: object) -> object:
        steps.append(pulled)
        return launch(plan)  # type: ignore[arg-type]

    engine.runner.launch = watched  # type: ignore[method-assign, assignment]
    for _ in engine.generate(source()):
        pass
    assert steps[0] == first
    assert steps == sorted(steps)
    assert steps[-1] == COUNT


def test_the_answers_are_the_same() -> None:
    engine, _ = engine_of(700, max_batch_tokens=BUDGET, max_seqs=COUNT)
    asked = [request(f"r{i}", prompt(4 + i % 9, i), GREEDY) for i in range(COUNT)]
    assert answers(run_checked(engine, asked)) == {r.id: expected(r) for r in asked}
