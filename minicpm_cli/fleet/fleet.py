"""The fleet: a language model whose requests are answered by whichever worker has room. One is enough to begin.

Every worker holds as many requests as it has seats, and a few more, so that it never waits for the next. Requests with
the beginning of an earlier one go to the worker that has that beginning in its cache, while it is not much busier than
the others. What waits at one while another has a seat free goes there. A worker that dies is begun again, and so is
what ran on it: draws depend on a request alone, so its answer is the same but for rounding.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from minicpm_cli.errors import DeviceError, MinicpmError
from minicpm_cli.fleet.again import Again
from minicpm_cli.fleet.link import Link
from minicpm_cli.fleet.messages import Ask, Begun, Failed, Finished, FromWorker, Ready, Recall, Returned, Stop, Unsent
from minicpm_cli.llm.info import LLMInfo, Speculated, Totals
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.types import Event, Request, SamplingParams

_AHEAD = 8  # one in so many seats is asked for ahead
_BEGINNING = 256  # tokens that decide where a request goes
_BEGINNINGS = 4096  # that are remembered
_LIVES = 16  # of a worker in a row that may end without an answer
_LOADS = 3  # of them, while they load
_SECONDS = 0.02  # between looks for new requests
_SILENCE = 1800.0  # seconds without a step of its engine after which a worker is ended: a step may take minutes
_ABSENCE = 60.0  # seconds after which nobody was there to listen: this process was stopped, or its reader was


@dataclass(slots=True, eq=False)
class _Worker:
    link: Link
    info: LLMInfo | None = None
    open: dict[str, Request] = field(default_factory=dict)  # the newest come last
    recalled: set[str] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    gpu_peak_bytes: int | None = None
    alive: bool = True
    loaded: bool = False
    lives: int = 1  # since the last answer of a worker at this place
    heard: float = field(default_factory=time.monotonic)  # when it was last
    apart: bool = False  # takes nothing but a group of requests that are to be alone
    group: bool = False  # has it

    @property
    def seats(self) -> int:
        """For whatever comes."""
        return self.info.max_seqs if self.alive and self.loaded and self.info is not None and not self.apart else 0

    @property
    def room(self) -> int:
        return self.seats + max(self.seats // _AHEAD, 2) - len(self.open) if self.seats else 0

    @property
    def free(self) -> int:
        """Seats that nobody has."""
        return max(self.seats - len(self.open), 0)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The highest of all workers is where a request is begun first. One that still loads is better than none."""
        return self.alive + (self.seats > 0), self.free, self.room

    @property
    def waiting(self) -> int:
        """How many have no seat, and are not on their way back."""
        return max(len(self.open) - len(self.recalled) - self.seats, 0)

    def end(self, ident: str) -> Request | None:
        self.recalled.discard(ident)
        return self.open.pop(ident, None)

    def drop(self) -> list[Request]:
        """All of them."""
        left, self.open, self.recalled = list(self.open.values()), {}, set()
        return left


class Fleet:
    """See `minicpm_cli.llm.info.LanguageModel`. `notify` is told in words that a worker is gone.

    `anew` begins the worker of a number again after its death, if it had its model before; None: none is.
    """

    def __init__(
        self,
        prompter: Prompter,
        links: Sequence[Link],
        notify: Callable[[str], None] = lambda _: None,
        anew: Callable[[int], Link] | None = None,
    ) -> None:
        self._prompter, self._notify, self._anew = prompter, notify, anew
        self._inbox: SimpleQueue[tuple[_Worker, FromWorker | None]] = SimpleQueue()
        self._workers = [_Worker(link) for link in links]
        self._before: list[_Worker] = []  # whose places others have
        self._places: OrderedDict[int, int] = OrderedDict()  # where a beginning was seen last
        self._again = Again()
        self._epoch = 0
        self._looked = 0.0  # when somebody last listened
        self.defaults: SamplingParams = prompter.defaults
        self.speculated = Speculated()
        for worker in self._workers:
            self._listen(worker)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _listen(self, worker: _Worker) -> None:
        worker.link.begin(lambda message: self._inbox.put((worker, message)))

    def _load(self) -> None:
        """Until one worker has its model: others join when they have theirs. Raises what the last of them met."""
        error: Exception = DeviceError("all workers ended while they loaded the model.")
        lost: list[str] = []
        while all(worker.info is None for worker in self._workers):
            worker, message = self._inbox.get()
            if isinstance(message, Ready):
                worker.info, worker.loaded = message.info, True
            elif isinstance(message, Failed | None) and worker.alive:
                worker.alive, error = False, error if message is None else message.error
                lost.append(f"a worker failed while it loaded: {'it was killed' if message is None else error}")
                if not any(other.alive for other in self._workers):
                    raise error
        for told in lost:
            self._notify(told)

    def gather(self) -> int:
        """Waits until every worker has its model, or is gone; how many have it. Not while a stream runs."""
        while any(worker.alive and not worker.loaded for worker in self._workers):
            list(self._told())
        return self._check_alive()

    @property
    def info(self) -> LLMInfo:
        """The sizes are those of all workers together."""
        known = [worker.info for worker in self._workers if worker.info is not None]
        return replace(
            known[0],
            device=", ".join(info.device for info in known),
            max_seqs=sum(info.max_seqs for info in known),
            weight_bytes=sum(info.weight_bytes for info in known),
            cache_bytes=sum(info.cache_bytes for info in known),
            context=min(info.context for info in known),
            cache_tokens=sum(info.cache_tokens for info in known),
            load_seconds=max(info.load_seconds for info in known),
        )

    @property
    def totals(self) -> Totals:
        """Of answers that are finished."""
        every = [worker.totals for worker in (*self._before, *self._workers)]
        return Totals(
            sum(totals.prompt_tokens for totals in every),
            sum(totals.cached_tokens for totals in every),
            sum(totals.generated_tokens for totals in every),
        )

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Of the worker that took most."""
        peaks = (worker.gpu_peak_bytes for worker in (*self._before, *self._workers))
        return max((peak for peak in peaks if peak), default=None)

    def encoded(self, request: Request) -> Request:
        return self._prompter.encoded(request)

    def prompt(self, request: Request) -> list[int]:
        return self._prompter.prompt(request)

    def token_bytes(self, ident: int) -> bytes:
        return self._prompter.token_bytes(ident)

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        return self._prompter.pieces(ids)

    def forget(self) -> None:
        raise NotImplementedError("a fleet keeps what its workers have read")

    def close(self) -> None:
        for worker in self._workers:
            worker.link.close()
        for worker in (*self._before, *self._workers):
            worker.link.join()

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        self._epoch += 1
        self._looked = time.monotonic()
        source, more = iter(requests), True
        try:
            while more or self._open or self._again:
                self._check_alive()
                yield from self._silent()
                self._hand_again()
                more = more and self._ask(source)
                self._level()
                yield from self._told()
        finally:
            for worker in self._workers:
                if worker.drop():
                    worker.link.send(Stop())
            self._again = Again()

    @property
    def _open(self) -> bool:
        return any(worker.open for worker in self._workers)

    def _ask(self, source: Iterator[Request | None]) -> bool:
        """Hands requests out while there is room; False when there are no more."""
        while any(worker.room > 0 for worker in self._workers):
            try:
                request = next(source)
            except StopIteration:
                return False
            if request is None:
                return True
            self._hand(request, self._place(request))
        return True

    def _level(self) -> None:
        """Calls the newest of what waits at one worker back, as far as others have seats for it.

        Else the last rows of a file would wait here for seats that are free there: 1,024 on two GPUs of 256 seats took
        2 to 3 % longer.
        """
        free = sum(worker.free - len(worker.recalled) for worker in self._workers)
        for worker in self._workers:
            if (count := min(worker.waiting, free)) > 0:
                ids = [ident for ident in reversed(worker.open) if ident not in worker.recalled][:count]
                worker.recalled.update(ids)
                worker.link.send(Recall(self._epoch, tuple(ids)))
                free -= count

    def _hand_again(self) -> None:
        """What waits for a worker goes to those that have seats; what is to be alone, to one that has nothing else."""
        while self._again.waiting and self._workers[number := self._emptiest()].seats:
            self._hand(self._again.waiting.popleft(), number)
        if self._again.groups and not any(worker.apart for worker in self._workers):
            best = self._workers[self._emptiest()]
            best.apart = best.seats > 0
        for number, worker in enumerate(self._workers):
            if worker.apart and worker.alive and not worker.open:
                group = self._again.groups.popleft() if self._again.groups else ()
                worker.apart = worker.group = bool(group)
                for request in group:
                    self._hand(request, number)

    def _hand(self, request: Request, number: int) -> None:
        worker = self._workers[number]
        if not worker.open:
            worker.heard = time.monotonic()
        worker.open[request.id] = request
        worker.link.send(Ask(self._epoch, request))

    def _place(self, request: Request) -> int:
        """The worker that knows the beginning, unless another has far more room, or a seat where that one has none."""
        best = self._emptiest()
        beginning = hash(tuple((request.ids or ())[:_BEGINNING]))
        known = self._places.pop(beginning, best)
        here, there = self._workers[known], self._workers[best]
        if here.room <= 0 or there.room > 2 * here.room or here.free == 0 < there.free:
            known = best
        self._places[beginning] = known
        if len(self._places) > _BEGINNINGS:
            self._places.popitem(last=False)
        return known

    def _emptiest(self) -> int:
        ranks = [worker.rank for worker in self._workers]
        return ranks.index(max(ranks))

    def _check_alive(self) -> int:
        """How many are."""
        if not (alive := sum(worker.alive for worker in self._workers)):
            raise DeviceError("all workers have ended. What they had finished is kept; run the same command again.")
        return alive

    def _told(self) -> Iterator[Event]:
        """What the workers said, after a short wait."""
        try:
            worker, message = self._inbox.get(timeout=_SECONDS)
            while True:
                if worker in self._workers:  # a dead one that was begun again has been heard
                    yield from self._heard(self._workers.index(worker), message)
                worker, message = self._inbox.get_nowait()
        except Empty:
            return

    def _heard(self, number: int, message: FromWorker | None) -> Iterator[Event]:
        worker = self._workers[number]
        worker.heard = time.monotonic()
        if isinstance(message, Begun) and message.epoch == self._epoch:
            yield Event(message.id)
        elif isinstance(message, Finished):
            worker.totals, worker.gpu_peak_bytes, worker.lives = message.totals, message.gpu_peak_bytes, 1
            if message.epoch == self._epoch and worker.end(message.id) is not None:
                yield from message.events
        elif isinstance(message, Returned):
            if message.epoch == self._epoch and (request := worker.end(message.id)) is not None:
                self._again.waiting.append(request)
                self._hand_again()
        elif isinstance(message, Unsent):
            if message.epoch == self._epoch and worker.end(message.id) is not None:
                yield Event(message.id, finish="error", error=message.error)
        elif isinstance(message, Ready):
            worker.info, worker.loaded = message.info, True
        elif isinstance(message, Failed):
            self._notify(f"a worker failed: {message.error}")
            yield from self._lost(number)
        elif message is None:
            yield from self._lost(number)

    def _silent(self) -> Iterator[Event]:
        """Ends workers that have work and take no steps, as when a GPU hangs."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        for number, worker in enumerate(self._workers):
            if now - before > _ABSENCE:
                worker.heard = now
            elif worker.loaded and worker.alive and worker.open and now - worker.heard > _SILENCE:
                self._notify(f"a worker has taken no step for {_SILENCE / 60:.0f} minutes, and is ended")
                worker.link.kill()
                yield from self._lost(number)

    def _lost(self, number: int) -> Iterator[Event]:
        """Its requests go to the others, or to the one that is begun in its place."""
        worker = self._workers[number]
        if not worker.alive:
            return
        worker.alive, left, apart = False, worker.drop(), worker.group
        worker.apart = worker.group = False
        worker.link.close()
        begun = self._begin_again(number)
        if not left and not any(other.alive for other in self._workers):
            return  # what it has sent before may have been the last that was asked for
        alive = self._check_alive()
        others = "is begun again, as are" if begun else f"the other {alive} take"
        self._notify(f"a worker has ended; {'it ' if begun else ''}{others} its {len(left)} requests")
        given_up = self._again.died(left, apart=apart)
        if given_up is not None:
            count = self._again.deaths[given_up.id]
            error = MinicpmError(f"{count} workers ended while they worked on this request, the last on nothing else.")
            yield Event(given_up.id, finish="error", error=error)
        self._hand_again()

    def _begin_again(self, number: int) -> bool:
        """Not one that never had its model, nor one that ends time and again without an answer."""
        worker = self._workers[number]
        if self._anew is None or worker.info is None or worker.lives >= (_LIVES if worker.loaded else _LOADS):
            return False
        worker.link.kill()  # one that says it failed may still hold a GPU's memory
        try:
            link = self._anew(number)
        except Exception as error:  # noqa: BLE001 - a cluster's errors are many, and the others go on
            self._notify(f"a worker cannot be begun again: {error}")
            return False
        self._before.append(worker)
        self._workers[number] = _Worker(link, worker.info, lives=worker.lives + 1)
        self._listen(self._workers[number])
        return True
