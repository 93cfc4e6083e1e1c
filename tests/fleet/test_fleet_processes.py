"""Real workers over a tiny model: what one process answers, several answer too, though one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.cli.fleet import devices
from minicpm_cli.errors import ModelError, UsageError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ProcessLink
from minicpm_cli.fleet.messages import Order
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.llm import LLM
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Event, Message, Request, SamplingParams

COUNT = 24


@pytest.fixture
def order(tmp_path: Path) -> Order:
    path = write_checkpoint(tmp_path / "model", "minicpm4-0.5b", layers=2)
    options = LoadOptions(str(path), device="cpu", dtype="fp32", ctx=256, max_seqs=2)
    return Order(options, ModelFiles("tiny", path), 1, None)


def asked() -> list[Request]:
    params = SamplingParams(max_tokens=12, temperature=0.8)
    return [
        Request(str(n), (Message("user", f"hello number {n}"),), SamplingParams(**{**_fields(params), "seed": n}))
        for n in range(COUNT)
    ]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature")}


def texts(events: Iterator[Event]) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in events:
        assert event.error is None, event.error
        found[event.id] = found.get(event.id, "") + event.text
    return found


def test_a_worker_that_is_killed_costs_nothing_but_time(order: Order) -> None:
    with closing(LLM.open(order.options, order.files, threads=1)) as llm:
        alone = texts(llm.stream(asked()))
    links, said = [ProcessLink(order), ProcessLink(order)], list[str]()
    with closing(Fleet(Prompter.open(order.options, order.files), links, said.append)) as fleet:
        together: dict[str, str] = {}
        events = fleet.stream([fleet.encoded(request) for request in asked()])
        for number, event in enumerate(events):
            if number == 4:
                os.kill(links[0].pid, signal.SIGKILL)
            assert event.error is None, event.error
            together[event.id] = together.get(event.id, "") + event.text
        assert fleet.totals.generated_tokens > 0
    assert together == alone
    assert len(said) == 1
    assert len(set(alone.values())) > COUNT // 2, "they tell apart"


def test_what_a_worker_meets_while_it_loads_is_told(order: Order, tmp_path: Path) -> None:
    prompter = Prompter.open(order.options, order.files)
    for weights in order.files.path.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="bytes"):
        Fleet(prompter, [ProcessLink(order)], print)


@pytest.mark.parametrize(
    ("options", "gpus", "workers", "said"),
    [
        ({}, 2, 2, "give one of them"),
        ({}, 0, None, "at least 1"),
        ({"device": "cpu"}, 2, None, "--device is cpu"),
        ({}, None, 2, "--device cpu with it"),
    ],
)
def test_flags_that_contradict(options: dict[str, Any], gpus: int | None, workers: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        devices(LoadOptions("m", **options), gpus, workers)


def test_devices() -> None:
    assert devices(LoadOptions("m"), 2, None) == ["cuda:0", "cuda:1"]
    assert devices(LoadOptions("m", device="cpu"), None, 3) == ["cpu"] * 3
    assert devices(LoadOptions("m"), None, None) == []
