"""What a fleet and its workers say to each other. `epoch` counts the streams of a fleet: older ones are void."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.info import LLMInfo, Totals
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Event, Request


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to load; the first thing that it is told."""

    options: LoadOptions
    files: ModelFiles
    threads: int | None
    cache: Path | None


@dataclass(frozen=True, slots=True)
class Ask:
    """To a worker."""

    epoch: int
    request: Request


@dataclass(frozen=True, slots=True)
class Recall:
    """To a worker: give these back, if they have not ended yet."""

    epoch: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: what runs is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker that has loaded its model."""

    info: LLMInfo


@dataclass(frozen=True, slots=True)
class Alive:
    """From a worker whose engine has taken a step since it was last heard of."""


@dataclass(frozen=True, slots=True)
class Begun:
    """From a worker: the prompt of a request is computed."""

    epoch: int
    id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """From a worker: all events of a request, pieces of its text joined. Each is sent whole, so that the answer of a
    worker that dies can be begun again elsewhere.
    """

    epoch: int
    id: str
    events: tuple[Event, ...]
    totals: Totals
    gpu_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Returned:
    """From a worker that was told to give a request back; nothing of it will come any more."""

    epoch: int
    id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker that cannot go on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unsent:
    """From the way to a worker: it has not got this request."""

    epoch: int
    id: str
    error: Exception


ToWorker = Ask | Recall | Stop
FromWorker = Ready | Alive | Begun | Finished | Returned | Failed | Unsent
