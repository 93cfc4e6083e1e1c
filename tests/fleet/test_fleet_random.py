"""Fleets at random: whoever is slow, late, recalled or killed, each request has one answer, and it is its own."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from fleet_model import Run


@pytest.mark.parametrize(("again", "besides", "least"), [(False, "recalled", 25), (True, "poisoned", 10)])
def test_each_request_has_one_answer_whatever_befalls_the_workers(again: bool, besides: str, least: int) -> None:
    """Where they are begun again, no run ends, and whatever kills those that take it is given up alone."""
    runs = [Run(seed, again=again) for seed in range(30)]
    for run in runs:
        run.go()
    assert sum(run.told for run in runs) > 250
    assert sum(run.died for run in runs) > 10
    assert sum(getattr(run, besides) for run in runs) > least


def test_nothing_is_left_of_fleets_that_were_closed() -> None:
    Run(1000).go()
    before = _left()
    for seed in range(1001, 1006):
        Run(seed).go()
        Run(seed, again=True).go()
    threads, files = _left()
    assert threads <= before[0]
    assert files <= before[1]


def _left() -> tuple[int, int]:
    """Threads of fleets, and open files where the system says which."""
    gc.collect()  # a model of a worker knows itself
    folder = "/proc/self/fd"
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("fleet")]
    return len(threads), len(os.listdir(folder)) if os.path.isdir(folder) else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_request_has_one_answer_for_minutes() -> None:
    for seed in range(10_000, 12_000):
        Run(seed).go()
        Run(seed, again=True).go()
