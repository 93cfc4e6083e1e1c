"""What Prometheus reads: counts since the start, histograms of waiting times, and the state of this moment."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

from minicpm_cli.server.inbox import Inbox
from minicpm_cli.server.loop import EngineLoop
from minicpm_cli.server.served import Fronted
from minicpm_cli.types import Event

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_RATE_SECONDS = 10
_STATM = Path("/proc/self/statm")


class Histogram:
    """Seconds, in buckets that count everything up to their bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.about, "histogram")
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{self.name}_bucket{{le="{bound:g}"}} {total}'
        total += self._counts[-1]
        yield f'{self.name}_bucket{{le="+Inf"}} {total}'
        yield f"{self.name}_sum {self._sum:.6f}"
        yield f"{self.name}_count {total}"


class Metrics:
    """`hear` and `tick` are called in the thread of the event loop."""

    def __init__(self, llm: Fronted) -> None:
        self._llm = llm
        self._finished: Counter[str] = Counter()
        self._answered: Counter[tuple[str, int]] = Counter()
        self._begun: set[str] = set()
        self._first = Histogram(
            "minicpm_time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST
        )
        self._token = Histogram(
            "minicpm_time_per_output_token_seconds", "Mean of each request, from one token to the next.", _TOKEN
        )
        self._whole = Histogram("minicpm_request_seconds", "From a request's arrival to its last token.", _WHOLE)
        self._history: deque[tuple[float, int]] = deque(maxlen=_RATE_SECONDS + 1)

    def hear(self, event: Event, inbox: Inbox) -> None:
        if event.id not in self._begun:
            self._begun.add(event.id)
            if event.finish is None:
                self._first.observe(time.monotonic() - inbox.begun)
        if event.finish is not None:
            self._begun.discard(event.id)
            self._finished[event.finish] += 1
            self._note_end(event, inbox)

    def answered(self, path: str, status: int) -> None:
        self._answered[path, status] += 1

    def tick(self) -> None:
        """Once a second."""
        self._history.append((time.monotonic(), self._llm.totals.generated_tokens))

    def _note_end(self, event: Event, inbox: Inbox) -> None:
        if event.finish == "error" or event.usage is None or event.timings is None:
            return
        self._whole.observe(time.monotonic() - inbox.begun)
        if event.usage.completion_tokens > 1:
            spent = event.timings.total_seconds - event.timings.first_token_seconds
            self._token.observe(spent / (event.usage.completion_tokens - 1))

    @property
    def tokens_per_second(self) -> float:
        """Of the last seconds."""
        if len(self._history) < 2:
            return 0.0
        (then, before), (now, after) = self._history[0], self._history[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def text(self, engine: EngineLoop) -> str:
        lines = [*self._requests(engine), *self._tokens(), *self._pages(), *self._memory()]
        for histogram in (self._first, self._token, self._whole):
            lines += histogram.lines()
        return "\n".join(lines) + "\n"

    def _requests(self, engine: EngineLoop) -> Iterator[str]:
        inside = self._llm.occupancy
        yield from _gauge("minicpm_requests_running", "Requests that tokens are computed for.", inside.running)
        queued = engine.waiting + inside.waiting
        yield from _gauge("minicpm_requests_waiting", "Requests in the queue.", queued)
        yield from _counter("minicpm_preemptions_total", "Times that a request lost its pages.", inside.preemptions)
        name = "minicpm_requests_finished_total"
        yield from _head(name, "Requests that ended, by their reason.", "counter")
        yield from (f'{name}{{reason="{reason}"}} {count}' for reason, count in sorted(self._finished.items()))
        name = "minicpm_http_responses_total"
        yield from _head(name, "Calls answered, by path and status.", "counter")
        for (path, status), count in sorted(self._answered.items()):
            yield f'{name}{{path="{path}",status="{status}"}} {count}'

    def _tokens(self) -> Iterator[str]:
        totals = self._llm.totals
        yield from _counter("minicpm_prompt_tokens_total", "Tokens of prompts.", totals.prompt_tokens)
        yield from _counter("minicpm_cached_tokens_total", "Of those, found in the cache.", totals.cached_tokens)
        yield from _counter("minicpm_generated_tokens_total", "Tokens of answers.", totals.generated_tokens)
        rate = round(self.tokens_per_second, 2)
        yield from _gauge("minicpm_tokens_per_second", f"Tokens of answers, over {_RATE_SECONDS} seconds.", rate)

    def _pages(self) -> Iterator[str]:
        inside, name = self._llm.occupancy, "minicpm_cache_pages"
        yield from _head(
            name, "Pages of the cache: held by requests, kept for prompts that begin alike, free.", "gauge"
        )
        free = inside.pages_total - inside.pages_held - inside.pages_idle
        for state, count in (("held", inside.pages_held), ("kept", inside.pages_idle), ("free", free)):
            yield f'{name}{{state="{state}"}} {count}'

    def _memory(self) -> Iterator[str]:
        info = self._llm.info
        yield from _gauge("minicpm_weight_bytes", "Memory of the weights.", info.weight_bytes)
        yield from _gauge("minicpm_cache_bytes", "Memory of the cache.", info.cache_bytes)
        if (peak := self._llm.gpu_peak_bytes) is not None:
            yield from _gauge("minicpm_gpu_peak_bytes", "The most that was held of the GPU's memory.", peak)
        with suppress(OSError, ValueError, IndexError):  # Linux alone has it
            resident = int(_STATM.read_text().split()[1]) * PAGESIZE
            yield from _gauge("process_resident_memory_bytes", "Memory of the process.", resident)


def _head(name: str, about: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _gauge(name: str, about: str, value: float) -> Iterator[str]:
    yield from _head(name, about, "gauge")
    yield f"{name} {value}"


def _counter(name: str, about: str, value: float) -> Iterator[str]:
    yield from _head(name, about, "counter")
    yield f"{name} {value}"
