"""Kills batch runs and counts what that costs: `PYTHONPATH=.:tests:tests/batch python tests/batch/kills.py`.

Each run is a forked child with a fake model. It dies by SIGKILL at an operation on files or at a random moment, or
finds the disk full. What it leaves is checked, and the next one goes on from there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mortal import ALL, Fate, make_mortal

from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.errors import MinicpmError, RequestError, UsageError
from minicpm_cli.types import Request

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"ordered": True},
    {"retry_errors": True},
    {"ordered": True, "retry_errors": True},
    {"overwrite": True},
)
KILLED = -signal.SIGKILL
_FAILING = ("3", "5")


def _fails(request: Request) -> RequestError | None:
    return RequestError("internal", "always") if request.id in _FAILING else None


def attempt(
    source: Path, out: Path, *, seats: int = 4, delay: float = 0, fate: Fate | None = None, **mode: Any
) -> None:
    options = {"seed": 7, "progress": False} | mode
    if fate is not None:
        make_mortal(fate)
    run_batch(lambda: FakeLLM(fail=_fails, seats=seats, delay=delay), BatchOptions(str(source), str(out), **options))


def forked(work: Callable[[], None], kill_after: float | None = None) -> int:
    """The exit status of `work` in a child."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            work()
            code = 0
        except MinicpmError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write_source(path: Path, count: int) -> Path:
    """Ids as numbers and text, OpenAI's lines, a bad line, none at the end."""
    lines: list[Any] = [{"id": f"é{i}" if i % 3 else i, "prompt": f"w {'w ' * (i % 5)}"} for i in range(count)]
    lines.insert(2, {"custom_id": "o", "body": {"messages": [{"role": "user", "content": "世"}]}})
    data = [json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join([*data[:4], b"{bad", *data[4:]]))
    return path


def _parsed(raw: bytes) -> Any:
    row = json.loads(raw)
    with suppress(KeyError, TypeError):
        row["response"]["body"].pop("created", None)
    return row


class Undisturbed:
    """What a run that nothing happens to writes, and so what may be left of one that was killed."""

    def __init__(self, folder: Path, source: Path, *, ordered: bool) -> None:
        out = folder / f"undisturbed-{ordered}"
        attempt(source, out, ordered=ordered)
        self.ordered, self.lines = ordered, [_parsed(raw) for raw in out.read_bytes().splitlines()]
        self._known = {json.dumps(line) for line in self.lines}

    def count(self, out: Path, old: frozenset[bytes] = frozenset()) -> int:
        """How many rows there are: none of them torn (but the last), doubled or another; or all of them `old`."""
        whole = out.read_bytes().split(b"\n")[:-1] if out.exists() else []
        if old and set(whole) <= old:
            return 0
        seen = [json.dumps(_parsed(raw)) for raw in whole]
        assert set(seen) <= self._known, set(seen) - self._known
        assert len(set(seen)) == len(seen), "a row is there twice"
        return len(seen)

    def finished(self, out: Path) -> None:
        lines = [_parsed(raw) for raw in out.read_bytes().splitlines()]
        assert out.read_bytes().endswith(b"\n")
        assert sorted(map(json.dumps, lines)) == sorted(map(json.dumps, self.lines))
        assert lines == self.lines or not self.ordered
        left = [p.name for p in out.parent.iterdir() if p.name.startswith(out.name + ".")]
        assert left == [out.name + ".manifest.json"], left


def clear(out: Path) -> None:
    for path in out.parent.glob(out.name + "*"):
        path.unlink()


def resume(source: Path, out: Path, **mode: Any) -> None:
    """As a user would: the same command, but without --overwrite unless the old rows are still there."""
    try:
        attempt(source, out, **{k: v for k, v in mode.items() if k != "overwrite"})
    except UsageError:
        assert mode.get("overwrite")
        attempt(source, out, **mode)


def sweep(folder: Path, afters: tuple[int, ...] = (0, 1, ALL), *, full: bool = False) -> int:
    """Every operation of a small run, in every mode, from an empty OUT and from a torn one. How many were disturbed."""
    source = write_source(folder / "in", 5)
    truths = [Undisturbed(folder, source, ordered=ordered) for ordered in (False, True)]
    return sum(
        _swept(source, folder / f"out{number}{torn}", mode, truths[bool(mode.get("ordered"))], afters, torn, full)
        for number, mode in enumerate(MODES)
        for torn in (False, True)
        if not (torn and mode.get("overwrite"))
    )


def _swept(
    source: Path, out: Path, mode: dict[str, Any], truth: Undisturbed, afters: tuple[int, ...], torn: bool, full: bool
) -> int:
    disturbed = 0
    for at, after in product(range(1000), afters):
        old = _prepared(source, out, torn=torn, overwrite=bool(mode.get("overwrite")))
        fate = Fate(at, after, full)
        status = forked(partial(attempt, source, out, seats=2, fate=fate, **mode))
        assert status in (0, 3 if full else KILLED), (status, at, after, mode)
        disturbed += status != 0
        assert truth.count(out, old) >= 0
        if full and not torn and out.exists():
            assert out.read_bytes()[-1:] in (b"", b"\n"), "not whole"
        resume(source, out, **mode)
        truth.finished(out)
        if status == 0 and after == afters[-1]:
            break
    return disturbed


def _prepared(source: Path, out: Path, *, torn: bool, overwrite: bool) -> frozenset[bytes]:
    """An OUT that is not there, one that ends in the middle of a row, or, to overwrite it, one of another seed."""
    clear(out)
    if overwrite:
        attempt(source, out, seed=8)
        return frozenset(out.read_bytes().splitlines())
    if torn:
        attempt(source, out)
        data = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(data[: len(data) // 2]) + data[-1][:9])
    return frozenset()


def every_byte(folder: Path, step: int = 1) -> int:
    """SIGKILL after each byte of the last row, or each so many."""
    source, out = write_source(folder / "in", 3), folder / "out"
    truth, counted, pipe = Undisturbed(folder, source, ordered=False), Fate(watched=str(out)), os.pipe()

    def count() -> None:
        attempt(source, out, seats=1, fate=counted)
        os.write(pipe[1], json.dumps(counted.writes).encode())

    assert forked(count) == 0
    last = json.loads(os.read(pipe[0], 1 << 16))[-1]
    length = len(out.read_bytes().splitlines(keepends=True)[-1])
    places = {*range(0, length, step), length - 1, length}
    for after in sorted(places):
        clear(out)
        assert forked(partial(attempt, source, out, seats=1, fate=Fate(last, after))) == KILLED
        assert truth.count(out) == len(truth.lines) - (after < length)
        resume(source, out)
        truth.finished(out)
    return len(places)


def at_random(folder: Path, kills: int, seed: int) -> int:
    """Chains of runs that are killed until one gets to the end; half of them by the clock."""
    draw, done = random.Random(seed), 0
    source, out = write_source(folder / "in", 120), folder / "out"
    truths = [Undisturbed(folder, source, ordered=ordered) for ordered in (False, True)]
    while done < kills:
        mode, rows, status = MODES[draw.randrange(4)], 0, KILLED
        truth = truths[bool(mode.get("ordered"))]
        clear(out)
        while status == KILLED:
            if draw.random() < 0.5:
                status = forked(partial(attempt, source, out, delay=5e-5, **mode), draw.uniform(0.002, 0.03))
            else:
                fate = Fate(draw.randrange(80), draw.choice([0, ALL, draw.randrange(120)]))
                status = forked(partial(attempt, source, out, fate=fate, **mode))
            found = truth.count(out)
            dropped = 1 + len(_FAILING) if mode.get("retry_errors") else 0
            assert found >= rows - dropped, "rows are lost"
            rows, done = found, done + (status == KILLED)
        assert status == 0
        truth.finished(out)
    return done


def main(folder: Path, what: str, *numbers: str) -> None:
    begun = time.monotonic()
    given = tuple(map(int, numbers))
    if what == "random":
        disturbed = at_random(folder, *given)
    elif what == "bytes":
        disturbed = every_byte(folder, *given)
    else:
        disturbed = sweep(folder, given or (0, 1, ALL), full=what == "full")
    print(f"{disturbed} disturbed runs in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
