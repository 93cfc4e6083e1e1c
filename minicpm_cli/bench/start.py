"""How long a user waits: whole processes, timed from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from minicpm_cli.errors import MinicpmError

RUN = (sys.executable, "-m", "minicpm_cli")


def seconds_to_help(command: Sequence[str] = RUN) -> float:
    """Of `minicpm --help`, from the start of the process to its end."""
    start = time.perf_counter()
    _checked(subprocess.Popen([*command, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return time.perf_counter() - start


def seconds_to_first_text(model: str, flags: Sequence[str] = (), command: Sequence[str] = RUN) -> float:
    """Of `minicpm run` with `flags`, from the start of the process to the first byte of its answer."""
    arguments = [*command, "run", "--quiet", "-m", model, *flags, "-t", "0", "-n", "16", "Name three colours."]
    start = time.perf_counter()
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    answered = process.stdout.read(1)
    seconds = time.perf_counter() - start
    _checked(process)
    if not answered:
        raise MinicpmError(f"{' '.join(arguments)} gave no answer; its start is not measured")
    return seconds


def _checked(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=600)
    if process.returncode:
        last = errors.decode(errors="replace").strip().split("\n")[-1]
        raise MinicpmError(f"{' '.join(map(str, process.args))} ended with {process.returncode}: {last}")  # type: ignore[arg-type]


STARTS: Mapping[str, tuple[Callable[[str, Sequence[str]], float], str]] = MappingProxyType(
    {
        "help": (lambda model, flags: seconds_to_help(), "`minicpm --help`, the whole process"),
        "load": (seconds_to_first_text, "`minicpm run`, from the start of the process to the first byte of the answer"),
    }
)


def measure_start(name: str, model: str, repeats: int, flags: Sequence[str] = ()) -> tuple[float, ...]:
    """Seconds of each of `repeats` runs, after one that warms the disk cache and compiles what is compiled once."""
    once, _ = STARTS[name]
    return tuple(once(model, flags) for _ in range(repeats + 1))[1:]
