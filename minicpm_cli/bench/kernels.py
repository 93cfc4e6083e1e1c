"""Operations one by one: what each moves or computes a second, beside what a copy or a product does here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from minicpm_cli.kernels.capture import captured
from minicpm_cli.model.config import ModelConfig

Unit = Literal["GB/s", "TFLOP/s"]
Call = Callable[[], object]
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}
SAMPLES, SECONDS = 3, 0.03  # each number is the median of so many repetitions of so long
WARM_SECONDS = 0.1  # of the limits, which come first: clocks are still rising
COPY_BYTES, SIDE = 1 << 31, 8192  # of the copy and of the square product that set the limits
CPU_COPY_BYTES, CPU_SIDE = 1 << 26, 1024


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on data that no cache holds: `calls` do the same on different data. `amount`: of one call."""

    name: str
    unit: Unit
    amount: float  # bytes or operations
    calls: Sequence[Call]


Make = Callable[[], list[Case]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`rates` and `limit` in `unit`."""

    name: str
    unit: Unit
    rates: tuple[float, ...]
    limit: float


def measure_kernels(
    cfg: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    folder: Path | None = None,
) -> Iterator[Kernel]:
    """Those of a model of `cfg`; `say` hears of what cannot be run here. Compiled kernels are kept in `folder`."""
    from minicpm_cli.bench.kernel_cases import makers

    yield from tried(makers(cfg, device, dtype, folder), measure_limits(device, dtype), device, say)


def tried(
    makers: Iterable[tuple[str, Make]],
    limits: Mapping[Unit, float],
    device: torch.device,
    say: Callable[[str], None],
) -> Iterator[Kernel]:
    """What each makes, measured; `say` hears of those that do not run."""
    for name, make in makers:
        try:
            yield from _measured(make, limits, device)
        except (ImportError, RuntimeError) as error:
            say(f"{name}: does not run here ({_cause(error)})")


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first: when a capture fails, torch tells that it failed, not why."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]


@torch.inference_mode()
def _measured(make: Make, limits: Mapping[Unit, float], device: torch.device) -> list[Kernel]:
    """What `make` makes is freed at the end."""
    kernels = []
    for case in make():
        rates = tuple(case.amount / SCALE[case.unit] / seconds for seconds in seconds_a_call(case.calls, device))
        kernels.append(Kernel(case.name, case.unit, rates, limits[case.unit]))
    return kernels


@torch.inference_mode()
def measure_limits(device: torch.device, dtype: torch.dtype) -> dict[Unit, float]:
    """GB/s that a kernel reads and writes while it copies, TFLOP/s of a square product: the best of the samples.

    A plain copy would be done by the copy engines, which reach 2.6 of an H200's 4.2 TB/s.
    """
    gpu = device.type == "cuda"
    size, side = (COPY_BYTES, SIDE) if gpu else (CPU_COPY_BYTES, CPU_SIDE)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copied = min(seconds_a_call([lambda: torch.neg(source, out=target)], device, WARM_SECONDS))
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    multiplied = min(seconds_a_call([lambda: a @ b], device, WARM_SECONDS))
    return {"GB/s": 2 * size / copied / 1e9, "TFLOP/s": 2 * side**3 / multiplied / 1e12}


def seconds_a_call(calls: Sequence[Call], device: torch.device, seconds: float | None = None) -> tuple[float, ...]:
    """Of one of `calls`, from repetitions of all of them; on a GPU as a captured graph, so that no launch counts."""
    clock = _cuda_seconds if device.type == "cuda" else _host_seconds
    run = _captured(calls) if device.type == "cuda" else _all(calls)
    run()
    rounds = max(1, int((seconds or SECONDS) / max(clock(run, 1), 1e-6)))
    return tuple(clock(run, rounds) / rounds / len(calls) for _ in range(SAMPLES))


def _all(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Call]) -> Call:
    """Warmed up first: kernels compile, libraries open."""
    run = _all(calls)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        run()
    return graph.replay


def _cuda_seconds(run: Call, rounds: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _host_seconds(run: Call, rounds: int) -> float:
    begun = time.perf_counter()
    for _ in range(rounds):
        run()
    return time.perf_counter() - begun
