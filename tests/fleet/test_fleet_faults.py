"""What goes wrong between a fleet and its workers: none of it may end in silence, or take more than its own request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest
from fleet_model import Engine, Member, Prompter

from fakes import FakeLLM
from minicpm_cli.errors import DeviceError, MinicpmError
from minicpm_cli.fleet import ray_link
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ConnectionLink
from minicpm_cli.fleet.messages import Ask, Begun, Failed, Finished, Ready, Recall, Returned, Stop, Unsent
from minicpm_cli.fleet.worker import Asked, Inbox, Outbox
from minicpm_cli.llm.info import LLMInfo, Totals
from minicpm_cli.types import Event, Message, Request, SamplingParams


def asked(count: int, words: int = 1) -> list[Request]:
    return [Request(str(n), (Message("user", " ".join([str(n)] * words)),), ids=[n]) for n in range(count)]


def engine(seats: int = 2, step: float = 0.0) -> Engine:
    return Engine(random.Random(1), seats, step)


def fleet_of(*links: Any, said: list[str] | None = None) -> Fleet:
    return Fleet(Prompter(), links, (said if said is not None else []).append)  # type: ignore[arg-type]


class Scripted(ConnectionLink):
    """A worker of a few lines: `script` gets its end of the connection."""

    def __init__(self, script: Any) -> None:
        ours, self._theirs = Pipe()
        super().__init__(ours)
        self.thread = threading.Thread(target=self._work, args=(script,), daemon=True)
        self.thread.start()

    def _work(self, script: Any) -> None:
        with suppress(EOFError, OSError):
            script(self._theirs)
        self._theirs.close()


def ready(seats: int = 2, **more: Any) -> Ready:
    return Ready(LLMInfo("fake", **{"context": 64, "max_seqs": seats, **more}))


def ends(events: Iterator[Event]) -> dict[str, str]:
    found = dict[str, str]()
    for event in events:
        if event.finish is not None:
            assert event.id not in found
            found[event.id] = event.finish
    return found


def idle(seats: int) -> Scripted:
    return Scripted(lambda end: (end.send(ready(seats)), end.poll(20)))


def test_a_worker_of_many_seats_does_not_take_back_what_it_gave() -> None:
    """It has room for more ahead than one of few seats has at all, which is no reason to wait there."""
    with closing(fleet_of(idle(64), idle(2))) as fleet:
        fleet.gather()
        many, few = fleet._workers
        many.open = {request.id: request for request in asked(66)}
        fleet._level()
        assert many.recalled == {"64", "65"}
        for ident in ("64", "65"):
            assert list(fleet._heard(0, Returned(fleet._epoch, ident))) == []
        assert list(few.open) == ["64", "65"]
        fleet._level()
        assert not many.recalled


def test_a_worker_that_says_it_failed_need_not_end_before_others_take_over() -> None:
    def script(end: Connection) -> None:
        end.send(ready())
        end.recv()
        end.send(Failed(MinicpmError("a broken GPU")))
        while True:
            end.recv()  # until the fleet hangs up

    said, other = list[str](), Member(engine(step=0.01))
    with closing(fleet_of(Scripted(script), other.link, said=said)) as fleet:
        fleet.gather()
        begun = time.monotonic()
        assert len(ends(fleet.stream(asked(8)))) == 8
        assert time.monotonic() - begun < 4
    assert "a broken GPU" in said[0]
    assert len(said) == 2, "it is gone once"


def test_what_cannot_be_read_of_a_worker_is_its_end() -> None:
    def script(end: Connection) -> None:
        end.send(ready())
        end.recv()
        end.send_bytes(b"no pickle")
        while True:
            end.recv()  # until the fleet hangs up

    said, other = list[str](), Member(engine(step=0.01))
    broken = Scripted(script)
    with closing(fleet_of(broken, other.link, said=said)) as fleet:
        fleet.gather()
        assert len(ends(fleet.stream(asked(8)))) == 8
        broken.thread.join(5)
        assert not broken.thread.is_alive(), "nobody told it that it is not wanted any more"
    assert "cannot be read" in said[0]


def test_a_worker_that_cannot_read_what_it_is_told_ends() -> None:
    ours, theirs = Pipe()
    inbox = Inbox(theirs, FakeLLM(), Outbox(theirs))
    ours.send_bytes(b"no pickle")
    assert inbox.wait() is False


def test_what_is_stopped_is_not_begun_and_what_comes_behind_it_is() -> None:
    ours, theirs = Pipe()
    llm = FakeLLM()
    inbox = Inbox(theirs, llm, Outbox(theirs))
    for message in (Ask(1, asked(1)[0]), Ask(1, asked(2)[1]), Stop(), Ask(2, asked(1)[0]), Recall(1, ("0",))):
        ours.send(message)
    while "0" not in llm.cancelled:
        time.sleep(0.001)
    assert inbox.take() is None, "not before the stream that was stopped has ended"
    inbox.begin()
    assert inbox.take() == Ask(2, asked(1)[0])
    assert inbox.take() is None
    ours.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    deep: Any = "bottom"
    for _ in range(3000):
        deep = (deep,)
    requests = asked(6)
    requests[2] = replace(requests[2], params=SamplingParams(stop=deep))
    member = Member(engine())
    with closing(fleet_of(member.link)) as fleet:
        found = ends(fleet.stream(requests))
        assert found == {str(n): "error" if n == 2 else "stop" for n in range(6)}
        assert ends(fleet.stream(asked(1))) == {"0": "stop"}


def test_when_all_have_died_the_next_stream_says_so_too() -> None:
    member = Member(engine(step=0.05))
    with closing(fleet_of(member.link)) as fleet:
        events = fleet.stream(asked(4, 20))
        next(events)
        member.kill()
        with pytest.raises(DeviceError, match="all workers have ended"):
            list(events)
        with pytest.raises(DeviceError, match="all workers have ended"):
            list(fleet.stream(asked(1)))


def test_those_that_end_while_they_load_are_told_though_another_has_its_model() -> None:
    said, broken = list[str](), Scripted(lambda end: end.send(Failed(MinicpmError("no memory"))))
    killed, late = Scripted(lambda end: None), Member(engine(), late=0.2)
    with closing(fleet_of(broken, killed, late.link, said=said)) as fleet:
        assert sorted(said) == [
            "a worker failed while it loaded: it was killed",
            "a worker failed while it loaded: no memory",
        ]
        assert len(ends(fleet.stream(asked(4)))) == 4
    assert len(said) == 2


def test_when_none_gets_its_model_the_reason_is_told_not_that_another_was_killed() -> None:
    links = Scripted(lambda end: end.send(Failed(MinicpmError("no memory")))), Scripted(lambda end: time.sleep(0.2))
    with pytest.raises(MinicpmError, match="no memory"):
        fleet_of(*links)


def test_what_a_dead_worker_leaves_goes_to_none_that_still_loads() -> None:
    """It would wait there until that one has its model, which may take minutes."""
    asked_of_late = list[object]()

    def script(end: Connection) -> None:
        asked_of_late.append(end.recv())

    first, second, late = Member(engine(step=0.01)), Member(engine(step=0.01)), Scripted(script)
    with closing(fleet_of(first.link, second.link, late)) as fleet:
        while sum(worker.info is not None for worker in fleet._workers) < 2:
            list(fleet._told())
        events = fleet.stream(asked(12, 5))
        next(events)
        first.kill()
        assert len(ends(events)) == 12
        assert not asked_of_late


def test_one_that_still_loads_is_better_than_none() -> None:
    first, late = Member(engine(step=0.05)), Member(engine(), late=0.5)
    with closing(fleet_of(first.link, late.link)) as fleet:
        events = fleet.stream(asked(4, 5))
        next(events)
        first.kill()
        assert len(ends(events)) == 4


def test_a_request_that_kills_whoever_takes_it_is_given_up_and_the_others_are_answered() -> None:
    def script(end: Connection) -> None:
        end.send(ready())
        while not isinstance(message := end.recv(), Ask) or message.request.id != "3":
            if isinstance(message, Ask):
                done = Event(message.request.id, finish="stop")
                end.send(Finished(message.epoch, message.request.id, (done,), Totals(), None))

    said, links = list[str](), [Scripted(script) for _ in range(4)]

    def anew(_: int) -> Scripted:
        links.append(Scripted(script))
        return links[-1]

    with closing(Fleet(Prompter(), links[:], said.append, anew)) as fleet:  # type: ignore[arg-type]
        fleet.gather()
        found = ends(fleet.stream(asked(12)))
    assert found == {str(n): "error" if n == 3 else "stop" for n in range(12)}
    assert len(said) == len(links) - 4 >= 3, "each death is told once"


def test_the_context_is_what_every_worker_has() -> None:
    def script(context: int) -> Any:
        return lambda end: (end.send(ready(context=context)), end.poll(5))

    with closing(fleet_of(*map(Scripted, (script(64), script(32))))) as fleet:
        fleet.gather()
        assert fleet.info.context == 32


def test_an_actor_whose_worker_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a thread of that worker still reads from the connection, as the inbox of one that failed does."""

    def work(connection: Connection) -> None:
        threading.Thread(target=connection.poll, args=(20,), daemon=True).start()
        connection.recv()
        time.sleep(0.1)
        connection.send(Failed(MinicpmError("broken")))

    monkeypatch.setattr(ray_link, "work", work)
    hosted = ray_link.Hosted(None)  # type: ignore[arg-type]
    heard = hosted.hear() or []
    while (more := hosted.hear()) is not None:
        assert more != [], "nothing came within a second"
        heard += more
    assert [str(message.error) for message in heard] == ["broken"]  # type: ignore[union-attr]


def test_what_is_on_its_way_back_is_not_called_again_nor_another_for_it() -> None:
    few, many = idle(2), idle(8)
    with closing(fleet_of(few, many)) as fleet:
        fleet.gather()
        first, second = fleet._workers
        sent = list[Any]()
        few.send = sent.append  # type: ignore[method-assign]
        first.open = {request.id: request for request in asked(3)}
        for _ in range(3):
            fleet._level()
        assert [message.ids for message in sent] == [("2",)]
        first.open |= {request.id: request for request in asked(8)[3:]}
        second.open = {request.id: request for request in asked(12)[8:]}
        for _ in range(3):
            fleet._level()
        assert [message.ids for message in sent] == [("2",), ("7", "6", "5")], "four seats are free there"
        del second.open["8"]
        fleet._level()
        assert sent[-1].ids == ("4",)


def test_what_an_earlier_stream_gets_back_is_no_answer_in_this_one() -> None:
    """Its ids come again."""
    told = list[Any]()

    def script(end: Connection) -> None:
        end.send(ready(2))
        while True:
            message = end.recv()
            told.append(message)
            if isinstance(message, Ask) and message.epoch == 2:
                end.send(Returned(1, message.request.id))
                end.send(Begun(1, message.request.id))
                end.send(Finished(1, message.request.id, (Event("0", "old", finish="stop"),), Totals(), None))
                end.send(Unsent(1, message.request.id, MinicpmError("old")))
                end.send(Finished(2, message.request.id, (Event("0", "new", finish="stop"),), Totals(), None))
            elif isinstance(message, Ask):
                end.send(Begun(1, message.request.id))

    worker = Scripted(script)
    with closing(fleet_of(worker)) as fleet:
        events = fleet.stream(asked(1))
        next(events)
        events.close()
        assert [event.text for event in fleet.stream(asked(1))] == ["new"]
    worker.thread.join(5)
    assert [type(message) for message in told] == [Ask, Stop, Ask]


def test_a_worker_gives_back_what_the_model_has_not_begun() -> None:
    """The model says so itself, before its next step."""
    member, ours = Member(engine(seats=1, step=0.2)), list[Any]()
    with closing(fleet_of(member.link)) as fleet:
        hear, fleet._heard = fleet._heard, lambda number, message: (ours.append(message), hear(number, message))[1]  # type: ignore[method-assign]
        events = fleet.stream(asked(3, 20))
        next(events)
        member.link.send(Recall(1, ("2", "1")))
        while not any(isinstance(message, Finished) for message in ours):
            next(events)
        events.close()
    told = [message for message in ours if isinstance(message, Returned | Finished)]
    assert {(type(message), message.id) for message in told[:2]} == {(Returned, "1"), (Returned, "2")}
    assert isinstance(told[2], Finished)


def test_a_last_worker_that_ends_with_the_last_answer_has_given_it() -> None:
    def script(end: Connection) -> None:
        end.send(ready(2))
        for _ in range(2):
            message = end.recv()
            end.send(Finished(1, message.request.id, (Event(message.request.id, finish="stop"),), Totals(), None))

    with closing(fleet_of(Scripted(script))) as fleet:
        assert len(ends(fleet.stream(asked(2)))) == 2
        with pytest.raises(DeviceError):
            list(fleet.stream(asked(1)))


def test_a_worker_that_has_given_all_back_waits_for_more() -> None:
    """Its engine would look for requests every millisecond."""
    ours, theirs = Pipe()
    inbox = Inbox(theirs, FakeLLM(), Outbox(theirs))
    ours.send(Ask(1, asked(1)[0]))
    assert inbox.wait()
    mine = Asked(inbox)
    requests = mine.requests()
    assert next(requests) == asked(1)[0]
    assert next(requests) is None
    assert list(mine.messages(FakeLLM(), Event("0", finish="cancelled"))) == [Returned(1, "0")]
    assert list(requests) == []
    ours.close()


def test_deaths_of_one_stream_are_not_those_of_the_next() -> None:
    count = iter(range(9))

    def script(end: Connection) -> None:
        end.send(ready(1))
        while True:
            message = end.recv()
            if isinstance(message, Ask) and (number := next(count)) in (0, 1, 3):
                return
            if isinstance(message, Ask) and number == 2:
                end.send(Begun(message.epoch, "0"))
            elif isinstance(message, Ask):
                end.send(Finished(message.epoch, "0", (Event("0", finish="stop"),), Totals(), None))

    with closing(fleet_of(*(Scripted(script) for _ in range(4)))) as fleet:
        fleet.gather()
        events = fleet.stream(asked(1))
        next(events)
        events.close()
        assert ends(fleet.stream(asked(1))) == {"0": "stop"}


def test_a_beginning_that_is_known_is_no_reason_to_wait_where_another_has_a_seat() -> None:
    with closing(fleet_of(idle(16), idle(16))) as fleet:
        fleet.gather()
        request = asked(1)[0]
        known, other = fleet._workers
        assert fleet._place(request) == 0
        known.open = {request.id: request for request in asked(6)}
        assert fleet._place(request) == 0, "it has a seat"
        known.open = {request.id: request for request in asked(16)}
        other.open = {request.id: request for request in asked(15)}
        assert (known.room, other.room) == (2, 3)
        assert fleet._place(request) == 1
