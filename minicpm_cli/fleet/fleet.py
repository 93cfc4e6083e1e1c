"""The fleet: a language model whose requests are answered by whichever worker has room. One is enough to begin.

Every worker holds as many requests as it has seats, and a few more, so that it never waits for the next. Requests with
the beginning of an earlier one go to the worker that has that beginning in its cache, while it is not much busier than
the others. What waits at one while another has a seat free goes there. What ran on a worker that dies is begun again on
another: draws depend on a request alone, so its answer is the same but for rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from minicpm_cli.errors import DeviceError, MinicpmError
from minicpm_cli.fleet.link import Link
from minicpm_cli.fleet.messages import Ask, Begun, Failed, Finished, FromWorker, Ready, Recall, Returned, Stop, Unsent
from minicpm_cli.llm.info import LLMInfo, Speculated, Totals
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.types import Event, Request, SamplingParams

_AHEAD = 8  # one in so many seats is asked for ahead
_BEGINNING = 256  # tokens that decide where a request goes
_BEGINNINGS = 4096  # that are remembered
_TRIES = 3  # workers that a request may see die
_SECONDS = 0.02  # between looks for new requests


@dataclass(slots=True)
class _Worker:
    link: Link
    info: LLMInfo | None = None
    open: dict[str, Request] = field(default_factory=dict)  # the newest come last
    recalled: set[str] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    gpu_peak_bytes: int | None = None
    alive: bool = True

    @property
    def seats(self) -> int:
        return self.info.max_seqs if self.alive and self.info is not None else 0

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
    """See `minicpm_cli.llm.info.LanguageModel`. `notify` is told in words that a worker is gone."""

    def __init__(
        self, prompter: Prompter, links: Sequence[Link], notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self._prompter, self._notify = prompter, notify
        self._inbox: SimpleQueue[tuple[int, FromWorker | None]] = SimpleQueue()
        self._workers = [_Worker(link) for link in links]
        self._places: OrderedDict[int, int] = OrderedDict()  # where a beginning was seen last
        self._tries: dict[str, int] = {}
        self._epoch = 0
        self.defaults: SamplingParams = prompter.defaults
        self.speculated = Speculated()
        for number, worker in enumerate(self._workers):
            worker.link.begin(lambda message, number=number: self._inbox.put((number, message)))  # type: ignore[misc]
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Until one worker has its model: others join when they have theirs. Raises what the last of them met."""
        error: Exception = DeviceError("all workers ended while they loaded the model.")
        lost: list[str] = []
        while all(worker.info is None for worker in self._workers):
            number, message = self._inbox.get()
            worker = self._workers[number]
            if isinstance(message, Ready):
                worker.info = message.info
            elif isinstance(message, Failed | None) and worker.alive:
                worker.alive, error = False, error if message is None else message.error
                lost.append(f"a worker failed while it loaded: {'it was killed' if message is None else error}")
                if not any(other.alive for other in self._workers):
                    raise error
        for told in lost:
            self._notify(told)

    def gather(self) -> int:
        """Waits until every worker has its model, or is gone; how many have it. Not while a stream runs."""
        while any(worker.alive and worker.info is None for worker in self._workers):
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
        every = [worker.totals for worker in self._workers]
        return Totals(
            sum(totals.prompt_tokens for totals in every),
            sum(totals.cached_tokens for totals in every),
            sum(totals.generated_tokens for totals in every),
        )

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Of the worker that took most."""
        return max((worker.gpu_peak_bytes for worker in self._workers if worker.gpu_peak_bytes), default=None)

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
        for worker in self._workers:
            worker.link.join()

    def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
        self._epoch += 1
        source, more = iter(requests), True
        try:
            while more or self._open:
                self._check_alive()
                more = more and self._ask(source)
                self._level()
                yield from self._told()
        finally:
            for worker in self._workers:
                if worker.drop():
                    worker.link.send(Stop())
            self._tries.clear()

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

    def _hand(self, request: Request, number: int) -> None:
        worker = self._workers[number]
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
            number, message = self._inbox.get(timeout=_SECONDS)
            while True:
                yield from self._heard(number, message)
                number, message = self._inbox.get_nowait()
        except Empty:
            return

    def _heard(self, number: int, message: FromWorker | None) -> Iterator[Event]:
        worker = self._workers[number]
        if isinstance(message, Begun) and message.epoch == self._epoch:
            yield Event(message.id)
        elif isinstance(message, Finished):
            worker.totals, worker.gpu_peak_bytes = message.totals, message.gpu_peak_bytes
            if message.epoch == self._epoch and worker.end(message.id) is not None:
                yield from message.events
        elif isinstance(message, Returned):
            if message.epoch == self._epoch and (request := worker.end(message.id)) is not None:
                self._hand(request, self._emptiest())
        elif isinstance(message, Unsent):
            if message.epoch == self._epoch and worker.end(message.id) is not None:
                yield Event(message.id, finish="error", error=message.error)
        elif isinstance(message, Ready):
            worker.info = message.info
        elif isinstance(message, Failed):
            self._notify(f"a worker failed: {message.error}")
            yield from self._lost(number)
        elif message is None:
            yield from self._lost(number)

    def _lost(self, number: int) -> Iterator[Event]:
        """Its requests go to the others, each of them until it has seen too many die."""
        worker = self._workers[number]
        if not worker.alive:
            return
        worker.alive, left = False, worker.drop()
        worker.link.close()
        if not left and not any(other.alive for other in self._workers):
            return  # what it has sent before may have been the last that was asked for
        alive = self._check_alive()
        self._notify(f"a worker has ended; its {len(left)} requests go to the other {alive}")
        for request in left:
            self._tries[request.id] = self._tries.get(request.id, 0) + 1
            if self._tries[request.id] < _TRIES:
                self._hand(request, self._place(request))
            else:
                error = MinicpmError(f"{_TRIES} workers ended while they worked on this request.")
                yield Event(request.id, finish="error", error=error)
