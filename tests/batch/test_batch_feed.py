"""Reading and tokenizing ahead: the model waits for neither, and neither outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_tools import prompts, rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch import rows as rows_module
from minicpm_cli.batch.feed import Feed
from minicpm_cli.batch.records import Row
from minicpm_cli.batch.window import PrefixWindow, Ready
from minicpm_cli.errors import FileError, Interrupted, RequestError, UsageError
from minicpm_cli.types import Request


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def wait_for(what: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_rows_are_answered_while_a_pipe_keeps_its_next_ones(tmp_path: Path, out: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def write() -> None:
        with open(fifo, "wb", buffering=0) as pipe:
            for wanted in (2, 3, 6):
                while lines_of(out) < wanted:
                    pipe.write(b'{"prompt": "row"}\n' * (wanted - lines_of(out)))
                    wait_for(lambda wanted=wanted: lines_of(out) >= wanted)

    writer = threading.Thread(target=write)
    writer.start()
    assert run(fifo, out).ok == 6
    writer.join()


_WAITING = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.errors import MinicpmError
try:
    run_batch(FakeLLM, BatchOptions("-", sys.argv[1], seed=7))
except MinicpmError as e:
    print(e, file=sys.stderr)
    sys.exit(e.exit_code)
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_pipe_that_says_nothing_keeps_no_process_alive(out: Path, number: int) -> None:
    root = Path(__file__).resolve().parents[2]
    code = _WAITING.format(root=str(root), tests=str(root / "tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write('{"prompt": "a"}\n{"prompt": "b"}\n')
    process.stdin.flush()
    wait_for(lambda: lines_of(out) == 2)
    process.send_signal(number)
    wait_for(lambda: process.poll() is not None)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "2 rows: 2 ok" in said
    assert "Fatal" not in said
    assert len(rows(out)) == 2


def test_tokenizing_is_done_while_the_model_works(tmp_path: Path, out: Path) -> None:
    encoded: list[str] = []
    ahead: list[int] = []

    @dataclass
    class Working(FakeLLM):
        def encoded(self, request: Request) -> Request:
            encoded.append(request.id)
            return FakeLLM.encoded(self, request)

        def _events(self, request: Request) -> Any:
            ahead.append(len(encoded) - len(self.seen))
            return super()._events(request)

    source = write_lines(tmp_path / "in", [{"prompt": "x"} for _ in range(60)])
    assert run(source, out, Working(seats=1, delay=0.003)).ok == 60
    assert max(ahead) > 20


def test_what_one_row_does_to_the_tokenizer_is_its_own_error(tmp_path: Path, out: Path) -> None:
    @dataclass
    class Fragile(FakeLLM):
        def encoded(self, request: Request) -> Request:
            if request.id == "3":
                raise RequestError("bad_role", "no such role here")
            if request.id == "5":
                raise ZeroDivisionError("a bug")
            return FakeLLM.encoded(self, request)

    done = run(write_lines(tmp_path / "in", prompts(20)), out, Fragile())
    assert (done.ok, done.errors) == (18, {"bad_role": 1, "internal": 1})
    assert {row["line"] for row in rows(out) if "error" in row} == {3, 5}


def test_an_input_that_cannot_be_read_to_its_end(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rows_module.raw_lines

    def failing(*args: Any, **more: Any) -> Iterator[tuple[int, bytes]]:
        for n, line in enumerate(real(*args, **more)):
            if n == 9:
                raise OSError(5, "Input/output error")
            yield line

    source = write_lines(tmp_path / "in", prompts(20))
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "raw_lines", failing)
        with pytest.raises(FileError, match=r"Cannot read .*Input/output error"):
            run(source, out)
    assert len(rows(out)) == 9  # all that was read before
    assert run(source, out).ok == 11


def test_an_input_that_is_cut_while_it_is_read(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", ({"id": i, "prompt": "x" * 1000} for i in range(2000)))
    whole = source.read_bytes()

    def answer(request: Request) -> str:
        if request.id == "1":
            os.truncate(source, 1_200_000)
        return "ok"

    with pytest.raises(FileError, match=r"was cut to \d+ of \d+ bytes while it was read"):
        run(source, out, FakeLLM(answer=answer))
    assert 500 < len(rows(out)) < 1200
    source.write_bytes(whole)
    run(source, out, retry_errors=True)
    assert sorted(row["id"] for row in rows(out)) == list(range(2000))


def test_an_input_that_is_changed_while_it_is_read(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", ({"id": i, "prompt": "x" * 1000} for i in range(2000)))

    def answer(request: Request) -> str:
        if request.id == "1":
            with open(source, "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"y")
        return "ok"

    with pytest.raises(FileError, match="was changed while it was read"):
        run(source, out, FakeLLM(answer=answer))
    with pytest.raises(UsageError, match="no longer the same"):
        run(source, out)


def test_the_window_is_all_that_is_held(tmp_path: Path, out: Path) -> None:
    encoded: list[str] = []

    @dataclass
    class Counting(FakeLLM):
        def encoded(self, request: Request) -> Request:
            encoded.append(request.id)
            assert len(encoded) - lines_of(out) < 530  # 512 wait, 4 run, one is on its way
            return FakeLLM.encoded(self, request)

    source = write_lines(tmp_path / "in", [{"prompt": "x"} for _ in range(1500)])
    assert run(source, out, Counting()).ok == 1500
    assert encoded == [str(n) for n in range(1, 1501)]


def test_a_stop_in_the_middle_ends_the_thread(tmp_path: Path, out: Path) -> None:
    class Stopped(FakeLLM):
        def _events(self, request: Request) -> Any:
            if request.id == "7":
                raise KeyboardInterrupt
            return super()._events(request)

    with pytest.raises(Interrupted):
        run(write_lines(tmp_path / "in", prompts(5000)), out, Stopped())
    assert not any(thread.name.startswith("batch") for thread in threading.enumerate())


class _Queue:
    full = False

    def enter(self, line: int) -> None: ...


def test_many_bad_lines_do_not_keep_the_model_waiting() -> None:
    bad = RequestError("invalid_json", "x")
    lines = (Row(n, n).failed(bad) if n != 500 else Row(n, n) for n in range(1000))
    feed = Feed(lines, lambda row: Ready(row, Request("x", "x")), _Queue(), PrefixWindow())  # type: ignore[arg-type]
    feed.start(Row(-1, -1))
    kinds = [type(item).__name__ for item in feed.items(idle=lambda: True)]
    feed.stop(patient=True)
    assert (kinds.count("Row"), kinds.count("Ready")) == (999, 2)
    longest = max(map(len, "".join("r" if kind == "Row" else " " for kind in kinds).split()))
    assert longest <= 64
