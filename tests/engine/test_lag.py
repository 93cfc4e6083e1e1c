"""A host that lags a step behind the device tells the same tokens, and loses no page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_cases import GREEDY, SAMPLED, answers, expected, prompt, request, run_checked
from lagged_cases import WAYS, lagged_engine

from minicpm_cli.engine.engine import EngineRequest


def mixed(count: int) -> list[EngineRequest]:
    kinds = (GREEDY, SAMPLED, replace(SAMPLED, top_p=1.0, top_k=0), replace(SAMPLED, min_p=0.05, top_k=0))
    return [request(f"r{i}", prompt(5 + 3 * i, i % 2), kinds[i % 4], seed=100 + i) for i in range(count)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [1, 3, 16, 1000])
@pytest.mark.parametrize("pages", [300, 24, 12], ids=["roomy", "tight", "least"])
def test_batched_chunked_and_preempted(way: str, budget: int, pages: int) -> None:
    engine, decoder = lagged_engine(way, pages=pages, max_batch_tokens=budget)
    requests = mixed(9)
    assert answers(run_checked(engine, requests)) == {r.id: expected(r) for r in requests}
    assert decoder.largest_step <= budget
    if pages < 300 and budget >= 16:
        assert engine.stats.preemptions
