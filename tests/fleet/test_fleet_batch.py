"""A batch over a fleet: whoever dies, and however many there are the next time, each row is there once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_model import Member

from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.batch.summary import BatchSummary
from minicpm_cli.errors import DeviceError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ConnectionLink
from minicpm_cli.types import Request, SamplingParams

COUNT = 60


class Texts:
    """As the fake model encodes and writes."""

    defaults = SamplingParams()

    def encoded(self, request: Request) -> Request:
        return FakeLLM().encoded(request)

    def token_bytes(self, ident: int) -> bytes:
        return FakeLLM().token_bytes(ident)


def workers(
    count: int,
    answer: Callable[[Request], str] = lambda request: f"You said: {asked_of(request)}",
    *,
    again: bool = False,
) -> Fleet:
    def begun(number: int) -> ConnectionLink:
        return Member(FakeLLM(delay=0.0005, seats=2 + number, answer=answer)).link

    fleet = Fleet(Texts(), list(map(begun, range(count))), anew=begun if again else None)  # type: ignore[arg-type]
    fleet.gather()
    return fleet


def asked_of(request: Request) -> str:
    return str(request.messages if isinstance(request.messages, str) else request.messages[-1].content)


class Source:
    """IN and OUT of a run in a folder, and what OUT must hold at its end."""

    def __init__(self, folder: Path) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        lines = [{"id": f"row {n}", "prompt": f"number {n}{' and on' * (n % 7)}"} for n in range(COUNT)]
        self.source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        self.texts = {line["id"]: f"You said: {line['prompt']}" for line in lines}

    def run(self, model: Callable[[], Any], **more: Any) -> BatchSummary:
        return run_batch(model, BatchOptions(str(self.source), str(self.out), {}, progress=False, **more))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self.out.read_text().splitlines()))

    def check(self) -> None:
        assert len(self.rows) == COUNT
        assert {row["id"]: row["text"] for row in self.rows} == self.texts


@pytest.fixture
def job(tmp_path: Path) -> Source:
    return Source(tmp_path)


def dying(after: int, count: int) -> Fleet:
    """All of its workers end when they have answered so many."""
    fleet = workers(count)
    hear, told = fleet._heard, iter(range(10**6))

    def heard(number: int, message: Any) -> Any:
        if next(told) == after:
            for worker in fleet._workers:
                worker.link.close()
        return hear(number, message)

    fleet._heard = heard  # type: ignore[method-assign]
    return fleet


@pytest.mark.parametrize("ordered", [False, True])
def test_each_run_may_have_other_workers_or_none(job: Source, ordered: bool) -> None:
    held = [0]
    for count in (2, 3, 1):
        with pytest.raises(DeviceError, match="all workers have ended"):
            job.run(lambda count=count: dying(30, count), ordered=ordered)
        held.append(len(job.rows))
    assert 0 < held[1] <= held[2] <= held[3] < COUNT
    assert ordered or held[1] < held[2] < held[3]
    done = job.run(FakeLLM if ordered else lambda: workers(4), ordered=ordered)
    job.check()
    assert (done.ok, done.skipped, done.failed, done.total) == (COUNT - held[3], held[3], 0, COUNT)
    if ordered:
        assert [row["id"] for row in job.rows] == list(job.texts)


def test_several_workers_write_in_order_and_the_summary_is_that_of_the_rows(job: Source) -> None:
    done = job.run(lambda: workers(3), ordered=True)
    job.check()
    assert [row["id"] for row in job.rows] == list(job.texts)
    usages = [row["usage"] for row in job.rows]
    assert done.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert done.completion_tokens == sum(usage["completion_tokens"] for usage in usages)


def test_the_summary_counts_each_row_once_though_its_worker_died(job: Source) -> None:
    def one_dies() -> Fleet:
        fleet = workers(3)
        hear, told = fleet._heard, iter(range(10**6))

        def heard(number: int, message: Any) -> Any:
            if next(told) == 25:
                fleet._workers[2].link.close()
            return hear(number, message)

        fleet._heard = heard  # type: ignore[method-assign]
        return fleet

    done = job.run(one_dies)
    job.check()
    assert (done.ok, done.failed) == (COUNT, 0)
    usages = [row["usage"] for row in job.rows]
    assert done.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert done.completion_tokens == sum(usage["completion_tokens"] for usage in usages)


def test_a_row_that_kills_whoever_takes_it_is_an_error_and_can_be_tried_again(job: Source) -> None:
    def answer(request: Request) -> str:
        if asked_of(request) == "number 7":
            raise OSError("as if its process had ended")
        return f"You said: {asked_of(request)}"

    done = job.run(lambda: workers(4, answer, again=True))
    failed = {row["id"] for row in job.rows if "error" in row}
    assert failed == {"row 7"}
    assert (done.ok, done.failed) == (COUNT - len(failed), len(failed))
    assert len(job.rows) == COUNT
    assert done.exit_code == 1
    again = job.run(lambda: workers(1), retry_errors=True)
    job.check()
    assert (again.ok, again.skipped) == (len(failed), COUNT - len(failed))


def test_the_end_of_the_workers_is_no_part_of_the_speed(job: Source) -> None:
    class Slow(Fleet):
        def close(self) -> None:
            time.sleep(0.3)
            super().close()

    def made() -> Fleet:
        fleet = workers(2)
        fleet.__class__ = Slow
        return fleet

    begun = time.monotonic()
    seconds = job.run(made).seconds
    assert seconds <= time.monotonic() - begun - 0.3
