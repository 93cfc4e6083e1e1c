"""A fleet of fake models in threads: who gets what, and what happens when one of them dies."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection, Pipe

import pytest

from fakes import FakeLLM, rendered
from minicpm_cli.errors import ContextOverflow, DeviceError, MinicpmError, RequestError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ConnectionLink
from minicpm_cli.fleet.messages import Recall
from minicpm_cli.fleet.worker import Outbox, sendable, serve
from minicpm_cli.types import Event, Message, Request, SamplingParams


class Prompter:
    """As the fake model encodes."""

    defaults = SamplingParams()

    def encoded(self, request: Request) -> Request:
        return FakeLLM().encoded(request)


class Workers:
    """Fake models behind connections, each in a thread; `kill` cuts one off as the death of its process does."""

    def __init__(self, *llms: FakeLLM) -> None:
        self.llms, self.said = llms, list[str]()
        self._ends: list[Connection] = []
        links = []
        for llm in llms:
            ours, theirs = Pipe()
            threading.Thread(target=self._serve, args=(llm, theirs), daemon=True).start()
            links.append(ConnectionLink(ours))
            self._ends.append(theirs)
        self.fleet = Fleet(Prompter(), links, self.said.append)  # type: ignore[arg-type]
        assert self.fleet.gather() == len(llms)  # one would be enough to begin

    def _serve(self, llm: FakeLLM, connection: Connection) -> None:
        try:
            serve(llm, connection, Outbox(connection))
        except OSError:
            pass
        finally:
            connection.close()

    def kill(self, number: int) -> None:
        import socket

        end = socket.socket(fileno=self._ends[number].fileno())
        end.shutdown(socket.SHUT_RDWR)
        end.detach()


def asked(count: int, text: str = "hello {}") -> list[Request]:
    return [Request(str(n), (Message("user", text.format(n)),)) for n in range(count)]


def answers(events: Iterator[Event]) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in events:
        assert event.error is None, event.error
        found[event.id] = found.get(event.id, "") + event.text
    return found


def expected(requests: list[Request]) -> dict[str, str]:
    return {request.id: f"You said: {request.messages[-1].content}" for request in requests}  # type: ignore[union-attr]


def test_all_are_answered_once_and_both_work() -> None:
    workers, requests = Workers(FakeLLM(delay=0.001), FakeLLM(delay=0.001)), asked(40)
    with closing(workers.fleet):
        assert answers(workers.fleet.stream(requests)) == expected(requests)
        assert sum(len(llm.seen) for llm in workers.llms) == 40
        assert workers.fleet.totals.generated_tokens == sum(llm.totals.generated_tokens for llm in workers.llms) > 40
        assert min(len(llm.seen) for llm in workers.llms) > 5
        assert workers.fleet.info.max_seqs == 8


def test_what_waits_at_one_worker_goes_to_another_that_has_a_seat_free() -> None:
    slow, fast = FakeLLM(delay=0.1), FakeLLM(delay=0.001)
    workers, requests = Workers(slow, fast), asked(12)  # four seats each, and two ahead
    with closing(workers.fleet):
        assert answers(workers.fleet.stream(requests)) == expected(requests)
    assert (len(slow.seen), len(fast.seen)) == (4, 8)


def test_what_waits_stays_where_nobody_else_has_a_seat() -> None:
    llms = FakeLLM(delay=0.01), FakeLLM(delay=0.01)
    workers = Workers(*llms)
    with closing(workers.fleet):
        fleet, sent = workers.fleet, list[object]()
        for worker in fleet._workers:
            link, send = worker.link, worker.link.send
            link.send = lambda message, send=send: (sent.append(message), send(message))[1]  # type: ignore[method-assign]
        events = fleet.stream(asked(12))
        for _ in range(12):
            next(events)
        assert not any(isinstance(message, Recall) for message in sent)
        events.close()


def test_requests_that_begin_alike_meet_at_one_worker() -> None:
    requests = [
        Request(f"{kind} {n}", (Message("system", f"{kind} " * 300), Message("user", str(n))))
        for n in range(12)
        for kind in ("red", "blue")
    ]
    workers = Workers(FakeLLM(delay=0.001), FakeLLM(delay=0.001))
    with closing(workers.fleet):
        fleet = workers.fleet
        answers(fleet.stream([fleet.encoded(request) for request in requests]))
    kinds = [{request.id.split()[0] for request in llm.seen[:4]} for llm in workers.llms]
    assert [len(kind) for kind in kinds] == [1, 1], kinds


def test_what_ran_on_a_dead_worker_is_answered_by_another() -> None:
    workers, requests = Workers(FakeLLM(delay=0.02), FakeLLM(delay=0.02)), asked(20)
    with closing(workers.fleet):
        found: dict[str, str] = {}
        for number, event in enumerate(workers.fleet.stream(requests)):
            if number == 3:
                workers.kill(0)
            found[event.id] = found.get(event.id, "") + event.text
    assert found == expected(requests)
    assert any("a worker has ended" in line for line in workers.said)


def test_when_all_are_dead_that_is_an_error() -> None:
    workers = Workers(FakeLLM(delay=0.05))
    with closing(workers.fleet):
        events = workers.fleet.stream(asked(4))
        next(events)
        workers.kill(0)
        with pytest.raises(DeviceError, match="all workers have ended"):
            list(events)


def test_a_stream_that_is_closed_stops_the_workers_and_another_begins() -> None:
    llm = FakeLLM(delay=0.01, answer=lambda request: "word " * 50 if request.id == "0" else "short")
    workers = Workers(llm)
    with closing(workers.fleet):
        with closing(workers.fleet.stream(asked(1))) as events:
            next(events)
        again = asked(2)[1:]
        assert answers(workers.fleet.stream(again)) == {"1": "short"}
        assert llm.aborted == ["0"]


def test_a_request_that_fails_is_told_with_its_code() -> None:
    def fail(request: Request) -> MinicpmError | None:
        return ContextOverflow(9, 9, 9) if request.id == "1" else None

    workers = Workers(FakeLLM(fail=fail))
    with closing(workers.fleet):
        errors = {event.id: event.error for event in workers.fleet.stream(asked(3)) if event.error}
    assert {name: error.code for name, error in errors.items()} == {"1": "context_overflow"}  # type: ignore[attr-defined]


def test_a_source_that_pauses_is_asked_again() -> None:
    workers = Workers(FakeLLM())

    def source() -> Iterator[Request | None]:
        for request in asked(3):
            yield request
            for _ in range(3):
                yield None

    with closing(workers.fleet):
        begun = time.monotonic()
        assert len(answers(workers.fleet.stream(source()))) == 3
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "error", [RequestError("bad_role", "no"), ContextOverflow(5, 6, 7), DeviceError("gone"), MinicpmError("x")]
)
def test_errors_arrive_whole(error: MinicpmError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code, vars(again)) == (type(error), str(error), error.code, vars(error))


def test_an_error_that_cannot_be_sent_is_sent_as_words() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    sent = sendable(Event("a", finish="error", error=Odd(1, 2))).error
    assert isinstance(sent, MinicpmError)
    assert "Odd: 1 and 2" in str(sent)
    assert rendered(asked(1)[0]) == "user hello 0"
