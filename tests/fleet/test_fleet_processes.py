"""Real workers over a tiny model: what one process answers, several answer too, though one of them is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_cases import COUNT, asked, order_of, texts

from minicpm_cli.cli.fleet import Crew, crew
from minicpm_cli.errors import ModelError, UsageError
from minicpm_cli.fleet import link
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ProcessLink
from minicpm_cli.fleet.messages import FromWorker, Order, Returned
from minicpm_cli.llm.llm import LLM
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Event, Request


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return order_of(tmp_path)


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


def test_what_an_engine_has_got_but_not_begun_goes_to_another(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> list[Request]:
        """A worker has two seats, and asks for two more: one gets the long ones."""
        long = [replace(request.params, max_tokens=200, ignore_eos=True) for request in asked()[:8]]
        return [
            replace(request, params=params) if number % 2 == 0 else request
            for number, (request, params) in enumerate(zip(asked()[:8], long, strict=True))
        ]

    with closing(LLM.open(order.options, order.files, threads=1)) as llm:
        alone = texts(llm.stream(mixed()))
    heard: list[FromWorker | None] = []
    hear = Fleet._heard

    def listening(self: Fleet, number: int, message: FromWorker | None) -> Iterator[Event]:
        heard.append(message)
        return hear(self, number, message)

    monkeypatch.setattr(Fleet, "_heard", listening)
    links = [ProcessLink(order), ProcessLink(order)]
    with closing(Fleet(Prompter.open(order.options, order.files), links)) as fleet:
        assert fleet.gather() == 2
        for _ in range(2):  # nothing of the first time is left over
            assert texts(fleet.stream([fleet.encoded(request) for request in mixed()])) == alone
    returned = [message.id for message in heard if isinstance(message, Returned)]
    assert {"4", "6"} <= set(returned) <= {"0", "2", "4", "6"}, returned


def test_workers_end_by_themselves_when_their_fleet_closes(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_SECONDS", 60.0)  # then they would be killed
    links = [ProcessLink(order), ProcessLink(order)]
    fleet = Fleet(Prompter.open(order.options, order.files), links)
    assert fleet.gather() == 2
    texts(fleet.stream([fleet.encoded(request) for request in asked()]))
    begun = time.monotonic()
    fleet.close()
    assert time.monotonic() - begun < 30.0
    assert [one._process.returncode for one in links] == [0, 0]


def test_a_worker_that_does_not_end_is_killed(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_SECONDS", 0.5)
    links = [ProcessLink(order), ProcessLink(order)]
    fleet = Fleet(Prompter.open(order.options, order.files), links)
    fleet.gather()
    for one in links:
        os.kill(one.pid, signal.SIGSTOP)
    begun = time.monotonic()
    fleet.close()
    assert time.monotonic() - begun < 10.0, "they share the time"
    assert [one._process.returncode for one in links] == [-signal.SIGKILL] * 2


def test_what_a_worker_meets_while_it_loads_is_told(order: Order, tmp_path: Path) -> None:
    prompter = Prompter.open(order.options, order.files)
    for weights in order.files.path.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="bytes"):
        Fleet(prompter, [ProcessLink(order)], print)


def test_a_process_is_none_of_the_folder_it_begins_in(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of the terminal: a Ctrl-C before its first line is not its business, and what it prints is no answer."""
    for name in ("random", "queue", "torch", "minicpm_cli"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    link = ProcessLink(order)
    os.kill(link.pid, signal.SIGINT)
    with closing(Fleet(Prompter.open(order.options, order.files), [link])) as fleet:
        assert fleet.gather() == 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        os.kill(link.pid, signal.SIGINT)
        if Path("/proc/self").exists():
            assert os.readlink(f"/proc/{link.pid}/fd/1") == os.devnull
        texts(fleet.stream([fleet.encoded(request) for request in asked()[:1]]))


def test_one_that_still_loads_is_not_waited_for(order: Order) -> None:
    link, told = ProcessLink(order), list[FromWorker | None]()
    os.kill(link.pid, signal.SIGSTOP)  # so that it takes its time
    link.begin(told.append)
    begun = time.monotonic()
    link.close()
    link.join()
    assert time.monotonic() - begun < 5.0
    assert link._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({}, (2, 2, None), "something else"),
        ({}, (2, None, "auto"), "something else"),
        ({}, (0, None, None), "at least 1"),
        ({"device": "cpu"}, (2, None, None), "--device is cpu"),
        ({}, (None, 2, None), "--device cpu with it"),
        ({}, (None, None, "auto"), "needs --workers"),
    ],
)
def test_flags_that_contradict(options: dict[str, Any], given: tuple[Any, Any, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        crew(LoadOptions("m", **options), *given)


def test_crews() -> None:
    assert crew(LoadOptions("m"), 2, None, None) == Crew(("cuda:0", "cuda:1"))
    assert crew(LoadOptions("m", device="cpu"), None, 3, None) == Crew(("cpu",) * 3)
    assert crew(LoadOptions("m"), None, 2, "auto") == Crew(("cuda", "cuda"), "auto")
    assert crew(LoadOptions("m"), None, None, None) is None
