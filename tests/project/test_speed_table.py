"""Each job of the speed table is a command that `minicpm bench` takes."""

from __future__ import annotations

from typing import Any

import pytest

from minicpm_cli.bench import command
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from project.speed_table import JOBS


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_a_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[command.BenchOptions] = []
    monkeypatch.setattr(command, "run_bench", lambda options, *_: seen.append(options.checked()))
    assert exit_code(["bench", "--json", *JOBS[name].split()], Runtime()) == 0
    (options,) = seen
    assert options.json
    assert set(options.workloads) <= set(command.CHOICES)


def test_no_two_jobs_are_the_same() -> None:
    found: list[Any] = sorted(JOBS.values())
    assert len(set(found)) == len(found)
