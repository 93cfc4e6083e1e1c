"""What a hostile user does to a batch: lines without an end, names that are ours, files edited between two runs."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_tools import prompts, rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch import lines as lines_module
from minicpm_cli.batch import rows as rows_module
from minicpm_cli.batch.journal import Journal
from minicpm_cli.batch.keys import HashSet
from minicpm_cli.batch.lines import Line, raw_lines, read_lines
from minicpm_cli.batch.order import InOrder
from minicpm_cli.batch.records import Style, parse
from minicpm_cli.batch.summary import count_of
from minicpm_cli.errors import FileError, Interrupted, UsageError
from minicpm_cli.types import Request


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# ---- a line that never ends -----------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """Zeros, as /dev/zero has them, up to `size` bytes; remembers the most that was asked for at once."""

    def __init__(self, size: int) -> None:
        self.left, self.most = size, 0

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size >= 0, "without a limit"
        self.most = max(self.most, size)
        taken = min(size, self.left)
        self.left -= taken
        return bytes(taken)


def test_a_line_without_an_end_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 1000)
    monkeypatch.setattr(lines_module, "_PIECE", 100)
    source = Endless(100_000)
    assert [(line.number, line.data, line.too_long) for line in read_lines(source)] == [(1, b"", True)]  # type: ignore[arg-type]
    assert (source.left, source.most) == (0, 1001)


def test_a_stream_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 1000)
    monkeypatch.setattr(lines_module, "_PIECE", 100)
    monkeypatch.setattr(lines_module, "_ENDLESS", 10_000)
    zeros = Endless(1 << 60)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Beginning(b'{"prompt": "a"}\n', zeros)))
    with pytest.raises(FileError, match="line 2 has no end"):
        run("-", out)
    assert zeros.left > (1 << 60) - 20_000
    assert [row.get("text") is not None for row in rows(out) if row["id"] == 1] == [True]


class Beginning(io.BytesIO):
    """Lines, and behind them what never ends."""

    def __init__(self, data: bytes, rest: Endless) -> None:
        super().__init__(data)
        self._rest = rest

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(size) or self._rest.readline(size)


@pytest.mark.parametrize("length", [998, 999, 1000, 1001, 1099, 1100, 1101, 1102, 1200, 1201, 2500])
def test_the_longest_line(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 1000)
    monkeypatch.setattr(lines_module, "_PIECE", 100)
    data = b"a\n" + b"x" * length + b"\n\nb\n"
    found = list(read_lines(io.BytesIO(data)))
    assert [line.number for line in found] == [1, 2, 4]
    assert [line.too_long for line in found] == [False, length + 1 > 1000, False]
    pieces = list(raw_lines(io.BytesIO(data)))
    assert b"".join(raw for _, _, raw in pieces) == data
    assert [offset for _, offset, _ in pieces] == [sum(len(p[2]) for p in pieces[:n]) for n in range(len(pieces))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_that_is_too_long_is_an_error_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path, stream: bool
) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 1000)
    source = write_lines(tmp_path / "in", [{"prompt": "a"}, {"id": "long", "prompt": "x" * 5000}, {"prompt": "c"}])
    if stream:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    done = run("-" if stream else source, out)
    assert (done.ok, done.errors) == (2, {"invalid_json": 1})
    error = next(row for row in rows(out) if "error" in row)
    assert (error["id"], error["line"]) == (2, 2)
    assert "longer than" in error["error"]["message"]
    if not stream:
        assert run(source, out).skipped == 3


# ---- a resume -------------------------------------------------------------------------------------------------------


def test_finished_lines_are_not_understood_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", [*prompts(300), b"", {"prompt": "nameless"}, {"id": 2.5, "prompt": "x"}])
    run(source, out)
    parsed: list[int] = []
    real = rows_module.parse

    def counting(line: Any, *rest: Any) -> Any:
        parsed.append(line.number)
        return real(line, *rest)

    monkeypatch.setattr(rows_module, "parse", counting)
    assert run(source, out).skipped == 302
    assert parsed == []
    with open(source, "ab") as f:
        f.write(b'{"id":"new","prompt":"y"}\n')
    done = run(source, out)
    assert (done.skipped, done.ok) == (302, 1)
    assert parsed == [303, 304]  # what stands before a line says how an unreadable one is answered


def test_a_broken_line_is_answered_as_the_finished_one_before_it(tmp_path: Path, out: Path) -> None:
    openai = {"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "x"}}
    source = write_lines(tmp_path / "in", [{"prompt": "a"}, openai])
    run(source, out)
    with open(source, "ab") as f:
        f.write(b"{broken\n")
    assert run(source, out).failed == 1
    assert rows(out)[-1]["response"]["status_code"] == 400


@pytest.mark.parametrize("text", [' {"id":1,"prompt":"x"}', '\t{"id":1,"prompt":"x"} \r', '{"id":1 ,"prompt":"x" }'])
def test_white_space_around_a_line_and_a_row(tmp_path: Path, out: Path, text: str) -> None:
    source = write_lines(tmp_path / "in", [text.encode(), b'{"id":2,"prompt":"y"} {}', b"{} x"])
    done = run(source, out)
    assert (done.ok, done.errors) == (1, {"invalid_json": 2})
    assert "Extra data at character 23" in next(r for r in rows(out) if r["id"] == 2)["error"]["message"]
    out.write_bytes(b"\xef\xbb\xbf  " + b" \n ".join(out.read_bytes().splitlines()) + b"\t\r\n")
    assert run(source, out).skipped == 3


def test_flags_of_a_set() -> None:
    members = HashSet(range(10, 1000, 3))
    members.add(5)
    asked = array("Q", [5, 0, 10, 11, 13, 2**64 - 1, 1, 997, 999])
    bits = "".join(f"{byte:08b}" for byte in members.flags(asked))
    assert bits == "".join(str(int(v in members)) for v in asked) + "0" * 7
    assert HashSet().flags(asked) == bytes(2)
    assert members.flags(array("Q")) == b""
    many = array("Q", range(200_000))
    packed = HashSet(range(0, 200_000, 7)).flags(many)
    assert [i for i in range(200_000) if packed[i // 8] >> (7 - i % 8) & 1] == list(range(0, 200_000, 7))


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.jsonl.tmp", "out.jsonl.lock", "out.jsonl.manifest.json.tmp"])
def test_files_that_only_look_like_ours_are_left_alone(tmp_path: Path, out: Path, name: str) -> None:
    source = write_lines(tmp_path / name, prompts(3))
    before = source.read_bytes()
    run(source, out)
    assert len(rows(out)) == 3
    assert source.read_bytes() == before
    out.write_bytes(out.read_bytes() + b'{"id": "r9", "line": 9, "error": {"code": "internal", "message": ""}}\n')
    run(source, out, retry_errors=True)
    assert source.read_bytes() == before


def test_an_input_that_the_run_would_overwrite(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "out.jsonl.manifest.json", prompts(3))
    before = source.read_bytes()
    with pytest.raises(UsageError, match="beside OUT"):
        run(source, out, overwrite=True)
    assert source.read_bytes() == before


@pytest.mark.parametrize("given", [{"source": ""}, {"out": ""}, {"out": "a\0b"}, {"source": "\0"}, {"summary": ""}])
def test_names_that_name_nothing(tmp_path: Path, out: Path, given: dict[str, str]) -> None:
    source = write_lines(tmp_path / "in", prompts(1))
    with pytest.raises(UsageError, match="no name of a file"):
        run(**{"source": source, "out": out, **given})


def test_a_summary_for_a_pipe_or_a_link(tmp_path: Path, out: Path) -> None:
    """A device is not replaced: as root, --summary /dev/stdout would have made a file of it."""
    source, pipe, link = write_lines(tmp_path / "in", prompts(3)), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run(source, out, summary=str(pipe))
    assert json.loads(os.read(reader, 1 << 16))["ok"] == 3
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link.symlink_to(tmp_path / "target")
    run(source, out, summary=str(link))
    assert json.loads((tmp_path / "target").read_text())["skipped"] == 3
    assert link.is_symlink()
    (tmp_path / "target").unlink()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(FileError):
        run(source, out, summary=str(link))


def test_a_private_output_stays_private(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", prompts(5))
    out.touch(0o600)
    out.chmod(0o600)
    run(source, out)
    out.write_bytes(b"".join(reversed(out.read_bytes().splitlines(keepends=True))))
    run(source, out, ordered=True)
    assert [row["id"] for row in rows(out)] == [f"r{i}" for i in range(5)]
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


# ---- what stands in lines and manifests -----------------------------------------------------------------------------

_ANY: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], {}, [[]], [None], {"a": 1}, 10**30, "\ud800", {"type": "text"}]
_NAMES = [
    *("id", "custom_id", "method", "url", "body", "prompt", "messages", "system", "n", "echo", "logit_bias", "tools"),
    *("temperature", "top_p", "top_k", "stop", "seed", "logprobs", "top_logprobs", "think", "schema", "regex"),
    *("response_format", "max_tokens", "max_completion_tokens", "chat_template_kwargs", "tool_choice", "unheard"),
]


@pytest.mark.parametrize("name", _NAMES)
def test_any_value_under_any_name(name: str) -> None:
    for value in _ANY:
        for line in (
            {"prompt": "a", name: value},
            {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "x"}]}, name: value},
            {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "x"}], name: value}},
            {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", name: value}},
            {"messages": [{"role": "user", "content": "x", name: value}]},
            {"messages": [{"role": value, "content": [value, {"type": "text", "text": value}]}]},
        ):
            row = parse(Line(1, 0, json.dumps(line).encode()), Style(keep_input=True))
            assert row.error is None or row.error.code != "internal", (line, row.error)


def test_a_fault_of_ours_is_that_row_s(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(messages: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr("minicpm_cli.batch.records.conversation", faulty)
    source = write_lines(tmp_path / "in", [{"prompt": "a"}, {"messages": []}, {"prompt": "c"}])
    done = run(source, out)
    assert (done.ok, done.errors) == (2, {"internal": 1})


def test_a_panic_of_the_tokenizer_is_that_row_s(tmp_path: Path, out: Path) -> None:
    """pyo3's PanicException is a BaseException."""

    class Panicking(FakeLLM):
        def encoded(self, request: Request) -> Request:
            if request.id in ("1", "4"):
                raise BaseException("byte index 3 is not a char boundary")
            return FakeLLM.encoded(self, request)

    done = run(write_lines(tmp_path / "in", prompts(9)), out, Panicking())
    assert (done.ok, done.errors) == (7, {"internal": 2})


@pytest.mark.parametrize("name", ["model", "parameters", "input", "files", "seed", "format"])
@pytest.mark.parametrize("value", [None, [], "x", -1, 1.5, 10**40, False])
def test_a_manifest_that_somebody_edited(tmp_path: Path, out: Path, name: str, value: Any) -> None:
    source = write_lines(tmp_path / "in", prompts(2))
    run(source, out)
    path = tmp_path / "out.jsonl.manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UsageError):
        run(source, out, seed=None)
    assert len(rows(out)) == 2


# ---- streams that are not there -------------------------------------------------------------------------------------


def _closed(command: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_closed_streams(tmp_path: Path, out: Path) -> None:
    """No model is needed for rows that are all bad."""
    source = write_lines(tmp_path / "in", [b"bad"])
    assert _closed('"$1" -m minicpm_cli batch "$2" "$3" 2>&-', source, out).returncode == 1
    assert len(rows(out)) == 1
    opened = _closed('"$1" -c "from minicpm_cli.cli import main; main()" --version <&- 2>&-; echo $?')
    assert opened.stdout.endswith("\n0\n")
    filled = "import os; from minicpm_cli import cli; cli._fill_closed_streams(); print(os.open(os.devnull, 0) > 2)"
    assert _closed(f'"$1" -c "{filled}" <&- 2>&-').stdout == "True\n"  # no file of ours is number 2
    done = _closed('"$1" -m minicpm_cli batch "$2" - >&-', source)
    assert (done.returncode, "no standard output" in done.stderr) == (2, True)
    done = _closed(
        '(echo before; "$1" -m minicpm_cli batch "$2" "$3" -q --summary /dev/stdout) > "$4"; cat "$4"',
        source,
        out,
        tmp_path / "log",
    )
    assert done.stdout.startswith("before\n{")


# ---- the output in other hands --------------------------------------------------------------------------------------


def _meddled(tmp_path: Path, out: Path, meddle: Callable[[], object]) -> None:
    source = write_lines(tmp_path / "in", prompts(20))

    def answer(request: Request) -> str:
        if request.id == "9":
            meddle()
        return "ok"

    with pytest.raises(FileError, match="changed by another program"):
        run(source, out, FakeLLM(answer=answer))


def test_a_line_that_another_program_appends_costs_no_row(tmp_path: Path, out: Path) -> None:
    """At the end so many bytes of the last rows were cut off, and the run called itself a success."""

    def append() -> None:
        with open(out, "ab") as f:
            f.write(b'{"id": "mine", "text": "a note"}\n')

    _meddled(tmp_path, out, append)
    assert len(rows(out)) == 21
    assert run(tmp_path / "in", out).skipped == 20


def test_an_output_that_is_emptied_is_noticed(tmp_path: Path, out: Path) -> None:
    _meddled(tmp_path, out, lambda: os.truncate(out, 0))
    assert run(tmp_path / "in", out).ok > 0
    assert len({row["id"] for row in rows(out)}) == 20


def test_a_row_reaches_the_disk_though_none_follows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), synced.set()))
    monkeypatch.setattr("minicpm_cli.batch.syncs.SECONDS", 0.05)
    journal = Journal(out)
    for row in (b"one\n", b"two\n"):
        journal.append(row)
    assert synced.wait(10)
    synced.clear()
    journal.append(b"three\n")
    assert synced.wait(10)
    journal.close()


def test_rows_that_wait_for_their_turn_are_bounded_in_bytes() -> None:
    class Rows(list[bytes]):
        def close(self) -> None: ...

    output = Rows()
    order = InOrder(output, window=100, size=1000)
    for line in range(5):
        order.enter(line)
    for line in (1, 2, 3):
        order.leave(line, b"x" * 400)
    assert order.full
    order.leave(0, b"first")
    assert not order.full
    assert [len(row) for row in output] == [5, 400, 400, 400]


# ---- signals --------------------------------------------------------------------------------------------------------


class _Deaf:
    """Its destructor is where the signal comes: Python tells of the exception and drops it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_destructor_is_not_lost(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", prompts(200))

    def answer(request: Request) -> str:
        if request.id == "9":
            _Deaf()
        return "ok"

    with pytest.raises(Interrupted, match=r"Stopped after \d+ rows"):
        run(source, out, FakeLLM(answer=answer))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(source, out).skipped < 100
    assert len(rows(out)) == 200


def test_one_row_is_one_row() -> None:
    assert [count_of(n) for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
