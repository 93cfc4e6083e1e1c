"""What the tests of real workers share: a tiny model, requests that draw, and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from checkpoints import write_checkpoint
from minicpm_cli.fleet.messages import Order
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Event, Message, Request, SamplingParams

COUNT = 24


def order_of(folder: Path) -> Order:
    path = write_checkpoint(folder / "model", "minicpm4-0.5b", layers=2)
    options = LoadOptions(str(path), device="cpu", dtype="fp32", ctx=256, max_seqs=2)
    return Order(options, ModelFiles("tiny", path), 1, None)


def asked() -> list[Request]:
    return [
        Request(str(n), (Message("user", f"hello number {n}"),), SamplingParams(max_tokens=12, temperature=0.8, seed=n))
        for n in range(COUNT)
    ]


def texts(events: Iterator[Event]) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in events:
        assert event.error is None, event.error
        found[event.id] = found.get(event.id, "") + event.text
    return found
