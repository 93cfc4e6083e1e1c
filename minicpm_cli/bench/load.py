"""`minicpm bench --server`: how much a server gives to many streams at once, as its clients see it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any, Protocol

from minicpm_cli.bench.speed import WORKLOADS
from minicpm_cli.bench.streams import Heard, Target, client
from minicpm_cli.errors import MinicpmError, UsageError
from minicpm_cli.llm.wire import CHAT, Refusal, Wire

STREAMS = 64
_ROUNDS = 4  # requests of each stream, where nobody says how many there are
_MOST_STREAMS = 4096
_PER_PROCESS = 64  # streams: on a slow core one client reads 10,000 chunks a second of each
_PERCENTILES = (50, 90, 99)
_WORDS = ("river", "stone", "light", "water", "green", "house", "paper", "winter", "garden", "letter", "silver")
_WORK = WORKLOADS["throughput"]  # over HTTP


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`requests` None: four of each stream."""

    server: str
    streams: int = STREAMS
    requests: int | None = None
    api_key: str | None = None
    model: str | None = None

    def checked(self) -> LoadOptions:
        """Itself. Raises UsageError."""
        if not 1 <= self.streams <= _MOST_STREAMS:
            raise UsageError(f"--streams is {self.streams}; it must be from 1 to {_MOST_STREAMS}")
        if self.requests is not None and self.requests < 1:
            raise UsageError(f"--requests is {self.requests}; it must be at least 1")
        return self

    @property
    def count(self) -> int:
        return self.requests or _ROUNDS * self.streams


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw. Times are in seconds: percentiles by name, `token` from one token of an answer to the next
    (its mean for each answer), `gap` from one piece of an answer to the next, `max` among them.

    `client_cpu` is what the clients themselves took of each core they ran on, by process, from 0 to 1.
    """

    model: str
    streams: int
    requests: int
    failed: int
    prompt_tokens: int
    tokens: int
    chunks: int
    seconds: float
    rate: float
    first: Mapping[str, float]
    token: Mapping[str, float]
    gap: Mapping[str, float]
    client_cpu: tuple[float, ...]
    errors: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"workload": "streams", "unit": "tok/s", **asdict(self)}, ensure_ascii=False)

    def lines(self) -> Iterator[str]:
        """For reading."""
        yield (
            f"{self.streams} streams  {self.rate:,.0f} tok/s  {self.requests} requests of "
            f"{self.prompt_tokens / max(1, self.requests - self.failed):,.0f} tokens, {self.tokens:,} new ones in "
            f"{self.seconds:.1f} s, {self.chunks / max(1, self.tokens):.2f} chunks a token, of {self.model}"
        )
        for name, what in (("first", "first token"), ("token", "each further token"), ("gap", "between two pieces")):
            yield f"{what:<19} " + "  ".join(
                f"{key} {1e3 * value:,.1f} ms" for key, value in getattr(self, name).items()
            )
        yield f"the clients' own CPU  {', '.join(f'{share:.0%}' for share in self.client_cpu)} of a core each"
        if self.failed:
            yield f"{self.failed} requests failed: {'; '.join(self.errors)}"


class Say(Protocol):
    def __call__(self, text: str, /) -> None: ...


def measure_load(options: LoadOptions, say: Say) -> Load:
    """Raises UsageError or MinicpmError before there is any load."""
    wire = Wire(options.server, options.api_key)
    target = Target(*wire.raw_post(CHAT))
    model = options.model or _model(wire)
    whole = _takes_ignore_eos(wire, model)
    words = _words(wire, model)
    drawn = f"{_WORK.new} drawn for each" if whole else f"up to {_WORK.new} (the server takes no ignore_eos)"
    say(f"{options.count} requests of {_WORK.prompt} tokens, {drawn}, by {options.streams} streams")
    draw = random.Random()
    bodies = [_streamed(_question(model, _text(draw, words), _WORK.new, whole=whole)) for _ in range(options.count)]
    parts = _parts(bodies, options.streams)
    begun, told = _run(target, parts)
    heard = [one for answers, _ in told for one in answers]
    return _load(options, model, heard, begun, [seconds for _, seconds in told])


# ---- what is asked ------------------------------------------------------------------------------------------------


def _model(wire: Wire) -> str:
    """The first one that the server names."""
    try:
        return str(wire.get("/v1/models")["data"][0]["id"])
    except Refusal as refusal:
        raise refusal.error() from None
    except (KeyError, IndexError, TypeError):
        raise MinicpmError(f"{wire.url} does not say which model it serves; name it with -m") from None


def _takes_ignore_eos(wire: Wire, model: str) -> bool:
    """So that no answer ends early, as with `minicpm bench throughput`; OpenAI itself refuses the field."""
    try:
        wire.post(CHAT, _question(model, _text(random.Random(0), 1), 1, whole=True))
    except Refusal as refusal:
        if "ignore_eos" in refusal.message:
            return False
        raise refusal.error() from None
    return True


def _words(wire: Wire, model: str) -> int:
    """How many words make a prompt of the size: two answers tell the tokens of a word and of what is around them."""
    few, many = 16, 80
    draw = random.Random(0)
    first, second = (_prompt_tokens(wire, model, _text(draw, count)) for count in (few, many))
    each = max((second - first) / (many - few), 0.01)
    return max(1, round((_WORK.prompt - first) / each) + few)


def _prompt_tokens(wire: Wire, model: str, text: str) -> int:
    try:
        return int(wire.post(CHAT, _question(model, text, 1))["usage"]["prompt_tokens"])
    except Refusal as refusal:
        raise refusal.error() from None
    except (KeyError, TypeError, ValueError):
        raise MinicpmError(f"{wire.url} does not count its tokens: there is no usage in its answer") from None


def _text(draw: random.Random, words: int) -> str:
    return " ".join([str(draw.randrange(10**9)), *draw.choices(_WORDS, k=max(0, words - 1))])


def _question(model: str, text: str, new: int, *, whole: bool = False) -> dict[str, Any]:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": new,
        "temperature": _WORK.temperature,
        "top_p": _WORK.top_p,
    }
    return asked | ({"ignore_eos": True} if whole else {})


def _streamed(question: dict[str, Any]) -> bytes:
    return json.dumps({**question, "stream": True, "stream_options": {"include_usage": True}}).encode()


# ---- by whom ------------------------------------------------------------------------------------------------------

Part = tuple[Sequence[bytes], int]  # bodies and streams of one process
Told = tuple[list[Heard], float]


def _parts(bodies: Sequence[bytes], streams: int) -> list[Part]:
    processes = max(1, min(-(-streams // _PER_PROCESS), (os.cpu_count() or 1)))
    shares = [len(range(i, streams, processes)) for i in range(processes)]
    return [(bodies[i::processes], share) for i, share in enumerate(shares) if bodies[i::processes]]


def _run(target: Target, parts: Sequence[Part]) -> tuple[float, list[Told]]:
    """When it began, and what each process heard."""
    with _clients(target, parts) as pipes:
        for pipe in pipes:
            _answer(pipe)
        begun = time.monotonic()
        for pipe in pipes:
            pipe.send(None)
        return begun, [_answer(pipe) for pipe in pipes]


@contextmanager
def _clients(target: Target, parts: Sequence[Part]) -> Iterator[list[Connection]]:
    spawn = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
    pipes, processes = list[Connection](), list[Any]()
    try:
        for bodies, share in parts:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=client, args=(theirs, target, bodies, share), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _answer(pipe: Connection) -> Any:
    try:
        told = pipe.recv()
    except EOFError:
        raise MinicpmError("a client process ended before its time; its errors are above") from None
    if isinstance(told, str):
        raise MinicpmError(f"a client cannot reach the server: {told}")
    return told


# ---- what came of it ----------------------------------------------------------------------------------------------


def _load(options: LoadOptions, model: str, heard: Sequence[Heard], begun: float, cpu: Sequence[float]) -> Load:
    good = [one for one in heard if one.error is None and one.first is not None]
    errors = tuple(sorted({one.error for one in heard if one.error}))[:3]
    if not good:
        raise MinicpmError(f"no request was answered: {'; '.join(errors) or 'no text came'}")
    seconds = max(one.arrivals[-1] for one in good) - begun
    tokens = sum(one.tokens for one in good)
    each = [(one.arrivals[-1] - (one.first or 0)) / (one.tokens - 1) for one in good if one.tokens > 1]
    gaps = [after - before for one in good for before, after in pairwise(one.arrivals)]
    return Load(
        model,
        options.streams,
        len(heard),
        len(heard) - len(good),
        sum(one.prompt_tokens for one in good),
        tokens,
        sum(one.chunks for one in good),
        seconds,
        tokens / seconds,
        _percentiles([(one.first or 0) - one.sent for one in good]),
        _percentiles(each),
        _percentiles(gaps),
        tuple(part / seconds for part in cpu),
        errors,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """The mean, the percentiles and the largest of `values`."""
    if not values:
        return {}
    ordered = sorted(values)
    at: Callable[[int], float] = lambda percent: ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]  # noqa: E731
    return {"mean": fmean(ordered), **{f"p{p}": at(p) for p in _PERCENTILES}, "max": ordered[-1]}
