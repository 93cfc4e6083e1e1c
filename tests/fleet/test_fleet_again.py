"""Workers that are begun again, and what ran on them: nobody pays for another's fault, and nothing goes on for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
from fleet_cases import COUNT, order_of, texts
from fleet_cases import asked as asked_of_processes
from fleet_model import Prompter
from test_fleet_faults import Scripted, asked, ends, ready

from fakes import FakeLLM
from minicpm_cli.errors import DeviceError, MinicpmError
from minicpm_cli.fleet import fleet as fleet_module
from minicpm_cli.fleet import ray_link, worker
from minicpm_cli.fleet.again import Again
from minicpm_cli.fleet.fleet import _LIVES, _LOADS, Fleet
from minicpm_cli.fleet.link import ProcessLink
from minicpm_cli.fleet.messages import Alive, Ask, Begun, Failed, Finished, Ready
from minicpm_cli.llm.info import Totals
from minicpm_cli.llm.llm import LLM
from minicpm_cli.llm.prompter import Prompter as RealPrompter
from minicpm_cli.types import Event


def begun_again(script: Callable[[Any], None], said: list[str] | None = None) -> tuple[Fleet, list[Scripted]]:
    """A fleet of one worker, and all that took its place."""
    links = [Scripted(script)]

    def anew(number: int) -> Scripted:
        assert number == 0
        links.append(Scripted(script))
        return links[-1]

    return Fleet(Prompter(), links[:], (said if said is not None else []).append, anew), links  # type: ignore[arg-type]


def answering(end: Any, deadly: set[str], seats: int = 8) -> None:
    """Answers what it reads, unless something deadly has come with it."""
    end.send(ready(seats))
    count = 0
    while True:
        messages = [end.recv()]
        while end.poll(0.05):
            messages.append(end.recv())
        found = [message for message in messages if isinstance(message, Ask)]
        if deadly & {message.request.id for message in found}:
            return
        for message in found:
            count += 1
            done = Event(message.request.id, finish="stop")
            end.send(Finished(message.epoch, message.request.id, (done,), Totals(generated_tokens=count), 7))


def test_the_first_death_is_nobody_s_fault() -> None:
    again, requests = Again(), asked(6)
    assert again.died(requests, apart=False) is None
    assert list(again.waiting) == requests
    assert not again.groups


def test_what_died_twice_is_begun_in_halves_until_one_is_alone() -> None:
    again, requests = Again(), asked(5)
    for _ in range(2):
        again.waiting.clear()
        again.died(requests, apart=False)
    assert [len(group) for group in again.groups] == [3, 2]
    first = again.groups.popleft()
    assert again.died(first, apart=True) is None
    assert [[request.id for request in group] for group in again.groups] == [["3", "4"], ["0", "1"], ["2"]]
    assert again.died([requests[2]], apart=True) is requests[2]
    assert not again.waiting


def test_one_that_was_the_only_one_by_chance_is_not_given_up_at_once() -> None:
    again, (request,) = Again(), asked(1)
    assert again.died([request], apart=False) is None
    assert again.died([request], apart=False) is None
    assert again.died([request], apart=True) is request


def test_only_what_kills_a_worker_is_given_up() -> None:
    said = list[str]()
    fleet, links = begun_again(lambda end: answering(end, {"3", "17"}), said)
    with closing(fleet):
        found = ends(fleet.stream(asked(20)))
        assert {name for name, end in found.items() if end == "error"} == {"3", "17"}
        assert len(found) == 20
        assert fleet.totals.generated_tokens == 18, "those of workers that are gone count"
        assert fleet.gpu_peak_bytes == 7
        assert ends(fleet.stream(asked(3))) == dict.fromkeys("012", "stop")
    assert len(said) == len(links) - 1
    assert "is begun again" in said[0]


def test_one_that_says_it_failed_is_begun_again_once() -> None:
    lives = iter(range(9))

    def script(end: Any) -> None:
        if next(lives):
            answering(end, set())
        end.send(ready())
        end.recv()
        end.send(Failed(MinicpmError("a broken GPU")))
        while True:
            end.recv()  # until the fleet hangs up

    fleet, links = begun_again(script)
    killed = list[bool]()
    links[0].kill = lambda: killed.append(True)  # type: ignore[method-assign]
    with closing(fleet):
        assert set(ends(fleet.stream(asked(4))).values()) == {"stop"}
    assert len(links) == 2
    assert killed, "it may still hold the memory that the next one needs"


def test_a_worker_that_never_answers_is_not_begun_for_ever() -> None:
    def script(end: Any) -> None:
        end.send(ready())
        end.recv()

    fleet, links = begun_again(script)
    with closing(fleet):
        for _ in range(_LIVES // 3):  # a stream of one request gives that up after its third death
            assert ends(fleet.stream(asked(1))) == {"0": "error"}
        with pytest.raises(DeviceError, match="all workers have ended"):
            list(fleet.stream(asked(1)))
    assert len(links) == _LIVES


def test_a_worker_that_answers_may_die_as_often_as_it_likes() -> None:
    def script(end: Any) -> None:
        end.send(ready(1))
        message = end.recv()
        done = Event(message.request.id, finish="stop")
        end.send(Finished(message.epoch, message.request.id, (done,), Totals(), None))

    fleet, links = begun_again(script)
    count = 2 * _LIVES
    with closing(fleet):
        assert ends(request for n in range(count) for request in fleet.stream(asked(n + 1)[n:])) == {
            str(n): "stop" for n in range(count)
        }
    assert len(links) >= count


def test_a_stream_that_ends_while_a_row_is_apart_leaves_nothing_behind() -> None:
    fleet, _ = begun_again(lambda end: answering(end, {"3"}))
    with closing(fleet):
        events = fleet.stream(asked(5))
        while not any(worker.apart for worker in fleet._workers):
            next(events)
        events.close()
        assert ends(fleet.stream(asked(3))) == dict.fromkeys("012", "stop")


def test_one_that_is_apart_has_no_seat_for_others() -> None:
    fleet, _ = begun_again(lambda end: answering(end, set()))
    with closing(fleet):
        fleet._workers[0].apart = True
        assert fleet._ask(iter(asked(1)))
        assert not fleet._workers[0].open
        fleet._workers[0].apart = False
        fleet._ask(iter(asked(1)))
        assert fleet._workers[0].open


def test_a_worker_that_cannot_load_any_more_is_not_begun_for_ever() -> None:
    lives = iter(range(99))

    def script(end: Any) -> None:
        if next(lives) == 0:
            end.send(ready())
            end.recv()

    fleet, links = begun_again(script)
    with closing(fleet), pytest.raises(DeviceError, match="all workers have ended"):
        list(fleet.stream(asked(4)))
    assert len(links) == _LOADS


def test_one_that_never_had_its_model_is_not_begun_again() -> None:
    with pytest.raises(DeviceError, match="all workers ended while they loaded"):
        begun_again(lambda end: None)


def test_what_cannot_be_begun_is_told() -> None:
    def anew(number: int) -> Any:
        raise RuntimeError("no cluster any more")

    said = list[str]()

    def script(end: Any) -> None:
        end.send(ready())
        end.recv()

    fleet = Fleet(Prompter(), [Scripted(script)], said.append, anew)  # type: ignore[arg-type]
    with closing(fleet), pytest.raises(DeviceError, match="all workers have ended"):
        list(fleet.stream(asked(4)))
    assert said == ["a worker cannot be begun again: no cluster any more"]


def test_one_that_takes_no_step_is_ended_and_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_SILENCE", 0.3)
    lives, said = iter(range(9)), list[str]()

    def script(end: Any) -> None:
        if next(lives):
            answering(end, set())
        end.send(ready())
        while True:
            end.recv()

    fleet, links = begun_again(script, said)
    with closing(fleet):
        time.sleep(0.5)  # nothing was asked of it meanwhile
        assert set(ends(fleet.stream(asked(4))).values()) == {"stop"}
    assert len(links) == 2
    assert "has taken no step" in said[0]
    assert "is begun again" in said[1]


def test_one_that_takes_its_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_SILENCE", 0.3)

    def script(end: Any) -> None:
        end.send(ready())
        message = end.recv()
        for _ in range(10):
            time.sleep(0.1)
            end.send(Alive())
        end.send(Finished(message.epoch, message.request.id, (Event("0", finish="stop"),), Totals(), None))
        end.recv()

    fleet, links = begun_again(script)
    with closing(fleet):
        time.sleep(0.5)  # nothing is asked of it yet
        assert ends(fleet.stream(asked(1))) == {"0": "stop"}
    assert len(links) == 1


def test_what_was_said_while_nobody_listened_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when this process was stopped for a night."""
    monkeypatch.setattr(fleet_module, "_SILENCE", 0.3)
    monkeypatch.setattr(fleet_module, "_ABSENCE", 0.2)

    def script(end: Any) -> None:
        end.send(ready())
        message = end.recv()
        end.send(Begun(message.epoch, "0"))
        time.sleep(0.6)
        end.send(Finished(message.epoch, message.request.id, (Event("0", finish="stop"),), Totals(), None))
        end.recv()

    fleet, links = begun_again(script)
    with closing(fleet):
        events = fleet.stream(asked(1))
        assert next(events).finish is None
        time.sleep(0.5)
        assert ends(events) == {"0": "stop"}
    assert len(links) == 1


def test_a_worker_beats_when_there_were_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEAT", 0.05)
    llm, (ours, theirs) = FakeLLM(), Pipe()
    thread = threading.Thread(target=worker.serve, args=(llm, theirs, worker.Outbox(theirs)))
    thread.start()
    assert isinstance(ours.recv(), Ready)
    assert not ours.poll(0.3), "it has done nothing"
    llm.steps += 1
    assert isinstance(ours.recv(), Alive)
    assert not ours.poll(0.3), "nothing more"
    ours.close()
    thread.join(5)
    assert not any(thread.name == "fleet-beat" for thread in threading.enumerate())


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_SILENCE", 1.0)
    order, said = order_of(tmp_path), list[str]()
    links = [ProcessLink(order), ProcessLink(order)]
    with closing(Fleet(RealPrompter.open(order.options, order.files), links, said.append)) as fleet:
        assert fleet.gather() == 2
        os.kill(links[0].pid, signal.SIGSTOP)
        found = texts(fleet.stream([fleet.encoded(request) for request in asked_of_processes()]))
    assert len(found) == COUNT
    assert links[0]._process.returncode == -signal.SIGKILL
    assert [line.split(";")[0] for line in said] == [said[0], "a worker has ended"]


def test_no_actor_waits_for_a_cluster_that_is_gone(tmp_path: Path) -> None:
    class Gone:
        def method(self, **_: object) -> Any:
            return lambda function: function

        def remote(self, **_: object) -> Any:
            return lambda made: None  # no actor can be made of it

        def nodes(self) -> list[dict[str, bool]]:
            return [{"Alive": False}]

    with pytest.raises(DeviceError, match="has no node any more"):
        ray_link.starter(Gone(), order_of(tmp_path), 1)(0)


def test_the_only_process_is_killed_twice_and_all_is_answered_the_same(tmp_path: Path) -> None:
    order = order_of(tmp_path)
    with closing(LLM.open(order.options, order.files, threads=1)) as llm:
        alone = texts(llm.stream(asked_of_processes()))
    links, said = [ProcessLink(order)], list[str]()

    def anew(_: int) -> ProcessLink:
        links.append(ProcessLink(order))
        return links[-1]

    together: dict[str, str] = {}
    with closing(Fleet(RealPrompter.open(order.options, order.files), links[:], said.append, anew)) as fleet:
        for number, event in enumerate(fleet.stream([fleet.encoded(request) for request in asked_of_processes()])):
            if number in (4, 30):
                os.kill(links[-1].pid, signal.SIGKILL)
            assert event.error is None, event.error
            together[event.id] = together.get(event.id, "") + event.text
    assert together == alone
    assert (len(links), len(said)) == (3, 2)
    assert [link._process.returncode for link in links] == [-signal.SIGKILL, -signal.SIGKILL, 0]
