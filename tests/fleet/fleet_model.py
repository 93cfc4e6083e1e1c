"""A model of the fleet's protocol, for random runs: engines that take their time, are told to give back, and die.

Each keeps the promises of the real one that matter here: it holds two requests beyond its seats, ends what is
cancelled between two steps, forgets cancellations when a stream begins, and never has a request twice.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from typing import Any

from fakes import FakeLLM
from minicpm_cli.errors import DeviceError, RequestError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.link import ConnectionLink, shut
from minicpm_cli.fleet.messages import Recall
from minicpm_cli.fleet.worker import Outbox, serve
from minicpm_cli.llm.info import Totals
from minicpm_cli.types import Event, Message, Request, SamplingParams, Timings, Usage

_AHEAD = 2  # requests in hand beyond the seats
_BAD = "bad"  # a request with this in its text ends with an error
_POISON = "poison"  # an engine that begins one with this in its text dies


class Engine(FakeLLM):
    """`step` seconds pass at most for each piece of text of all that have a seat."""

    def __init__(self, rng: random.Random, seats: int, step: float) -> None:
        super().__init__(seats=seats)
        self._rng, self._step = rng, step
        self._aborts: deque[str] = deque()

    def cancel(self, request_id: str) -> None:
        self._aborts.append(request_id)

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        self._aborts.clear()
        source, live, more = iter(requests), dict[str, deque[Event]](), True
        while more or live:
            while more and len(live) < self.seats + _AHEAD:
                request = next(source, StopIteration)
                if request is None:
                    break
                if not isinstance(request, Request):
                    more = False
                    break
                assert request.id not in live, "twice"
                live[request.id] = deque(_events(request))
            yield from self._cancelled(live)
            time.sleep(self._rng.random() * self._step)
            for ident in list(live)[: self.seats]:
                event = live[ident].popleft()
                if event.text.startswith(_POISON):
                    raise OSError("as if its process had ended")
                if event.finish is not None:
                    del live[ident]
                    self.totals = Totals(generated_tokens=self.totals.generated_tokens + 1)
                yield event

    def _cancelled(self, live: dict[str, Any]) -> Iterator[Event]:
        taken = set[str]()
        while self._aborts:
            taken.add(self._aborts.popleft())
        for ident in taken & live.keys():
            del live[ident]
            yield Event(ident, "left over")
            yield Event(ident, finish="cancelled")


def _events(request: Request) -> Iterator[Event]:
    text = text_of(request)
    if _BAD in text:
        yield Event(request.id, finish="error", error=RequestError("bad_role", text))
        return
    for word in text.split(" "):
        yield Event(request.id, f"{word} ")
    yield Event(request.id, finish="stop", usage=Usage(1, 1, 0), timings=Timings())


def text_of(request: Request) -> str:
    return request.messages[0].content  # type: ignore[union-attr, no-any-return, return-value]


@dataclass
class Member:
    """A worker in a thread. It begins `late` seconds after its fleet."""

    engine: Engine
    late: float = 0.0
    link: ConnectionLink = field(init=False)
    dead: bool = False

    def __post_init__(self) -> None:
        ours, self._end = Pipe()
        self.link = ConnectionLink(ours)
        self.recalled = 0
        send = self.link.send

        def counted(message: Any) -> None:
            self.recalled += len(message.ids) if isinstance(message, Recall) else 0
            send(message)

        self.link.send = counted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._work, name="member", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        time.sleep(self.late)
        with suppress(OSError):
            serve(self.engine, self._end, Outbox(self._end))
        self._shut()

    def kill(self) -> None:
        """As the death of a process does it: at any moment, within a message too."""
        self.dead = True
        self._shut()

    def _shut(self) -> None:
        with suppress(OSError):
            shut(self._end, socket.SHUT_RDWR)


class Prompter:
    """Requests have their tokens already."""

    defaults = SamplingParams()


@dataclass
class Run:
    """One fleet from its beginning to its end, as a seed decides. `told` are all of its streams' answers.

    With `again` its workers are begun again; every second such fleet has requests that kill whoever takes them, the
    others lose workers by accident.
    """

    seed: int
    requests: int = 24
    again: bool = False
    told: int = 0
    recalled: int = 0
    died: int = 0
    poisoned: int = 0

    def go(self) -> None:
        rng = self._rng = random.Random(self.seed)
        step = rng.choice([0.0, 0.001, 0.004])

        def begun() -> Member:
            engine = Engine(random.Random(rng.random()), rng.randint(1, 6), step * rng.choice([1, 1, 5]))
            return Member(engine, rng.choice([0.0, 0.0, 0.03]))

        members = [begun() for _ in range(rng.randint(1, 4))]

        def anew(_: int) -> ConnectionLink:
            members.append(begun())
            return members[-1].link

        links = [member.link for member in members]
        fleet = Fleet(Prompter(), links, anew=anew if self.again else None)  # type: ignore[arg-type]
        killer = threading.Thread(target=self._kill, args=(random.Random(rng.random()), members), daemon=True)
        try:
            killer.start()
            for number in range(rng.randint(1, 4)):
                self._stream(fleet, number, rng, members)
                assert not any(worker.open or worker.recalled for worker in fleet._workers)
        finally:
            fleet.close()
            killer.join()
        self.recalled = sum(member.recalled for member in members)
        self.died = sum(member.dead for member in members)
        assert all(member.link._connection.closed for member in members)
        for member in members:
            member.thread.join(10)
            assert not member.thread.is_alive(), "a worker goes on without its fleet"

    @property
    def _poisons(self) -> bool:
        return self.again and self.seed % 2 == 1

    def _kill(self, rng: random.Random, members: list[Member]) -> None:
        """Now and then all of them, mostly all but one at the most."""
        if self._poisons:
            return
        last = 0 if self.again or rng.random() < 0.1 else 1
        for member in rng.sample(members, rng.randint(0, len(members) - last)):
            time.sleep(rng.random() * 0.06)
            member.kill()

    def _stream(self, fleet: Fleet, number: int, rng: random.Random, members: list[Member]) -> None:
        asked = [self._request(number, ident, rng) for ident in range(rng.randint(1, self.requests))]
        leave = rng.randint(1, 30) if rng.random() < 0.3 else None
        found: dict[str, list[Event]] = {}
        events = fleet.stream(self._source(asked, rng))
        try:
            for count, event in enumerate(events):
                assert event.finish != "cancelled"
                found.setdefault(event.id, []).append(event)
                if count == leave:
                    break
        except DeviceError:
            assert not self.again
            assert all(member.dead for member in members)
            return
        finally:
            events.close()
        for request in asked:
            self._check(request, found.pop(request.id, []), left=leave is not None)
        assert not found

    def _request(self, stream: int, ident: int, rng: random.Random) -> Request:
        """Its id comes again in the next stream, its text does not."""
        text = " ".join(f"{stream}.{ident}.{word}" for word in range(rng.choice([0, 1, 3, 20])))
        beginning = [rng.randint(0, 3)] * 256
        if self._poisons and rng.random() < 0.05:
            text = f"{_POISON} {text}"
        bad = f" {_BAD}" if rng.random() < 0.1 else ""
        return Request(str(ident), (Message("user", text + bad),), ids=beginning)

    def _source(self, asked: list[Request], rng: random.Random) -> Iterator[Request | None]:
        for request in asked:
            while rng.random() < 0.15:
                yield None
            yield request

    def _check(self, request: Request, events: list[Event], *, left: bool) -> None:
        ends = [event for event in events if event.finish is not None]
        if left and not ends:
            return
        assert len(ends) == 1, (request.id, len(ends))
        assert events[-1] is ends[0], "nothing follows an end"
        self.told += 1
        poison = text_of(request).startswith(_POISON) and _BAD not in text_of(request)
        self.poisoned += poison
        if poison or "workers ended" in str(ends[0].error):
            assert "workers ended" in str(ends[0].error)
            assert poison or not self._poisons, "somebody else's fault"
        elif ends[0].finish == "error":
            assert str(ends[0].error) == text_of(request)
        else:
            assert "".join(event.text for event in events).split() == text_of(request).split()
