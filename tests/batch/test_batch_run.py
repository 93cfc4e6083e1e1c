from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_tools import no_model, prompts, rows, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch import run as run_module
from minicpm_cli.batch.files import Lock
from minicpm_cli.batch.journal import recover
from minicpm_cli.batch.options import BatchOptions, parse_shard
from minicpm_cli.batch.order import InOrder, restore_order
from minicpm_cli.batch.run import run_batch
from minicpm_cli.batch.scan import scan_input
from minicpm_cli.errors import DeviceError, FileError, Interrupted, ModelNotFound, RequestError, UsageError
from minicpm_cli.llm.info import LLMInfo
from minicpm_cli.types import Event, Request


def refused(error: type[Exception], match: str, source: Path | str, out: Path | str, **options: Any) -> None:
    before = Path(out).read_bytes() if Path(out).is_file() else None
    with pytest.raises(error, match=match):
        run_batch(no_model, BatchOptions(str(source), str(out), **({"progress": False, "seed": 7} | options)))
    if before is not None:
        assert Path(out).read_bytes() == before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", prompts(20))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_every_row_once(source: Path, out: Path, tmp_path: Path) -> None:
    summary = run(source, out, summary=str(tmp_path / "s.json"))
    assert sorted(r["id"] for r in rows(out)) == sorted(p["id"] for p in prompts(20))
    assert {r["id"]: r["text"] for r in rows(out)} == {p["id"]: f"You said: {p['prompt']}" for p in prompts(20)}
    assert (summary.ok, summary.failed, summary.exit_code) == (20, 0, 0)
    written = json.loads((tmp_path / "s.json").read_text())
    assert (written["ok"], written["seed"], written["interrupted"]) == (20, 7, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json", "s.json"]


def test_good_and_bad_lines_mixed(tmp_path: Path, out: Path) -> None:
    lines: list[Any] = []
    for i in range(100):
        lines += [
            {"id": f"g{i}", "prompt": f"q {i}"},
            b"{bad %d" % i,
            {"id": i + 1, "prompt": None},
            {"custom_id": f"o{i}", "url": "/v1/chat/completions", "body": {"messages": [{"role": "x"}]}},
            {"id": f"long{i}", "prompt": "w " * 60},
            b"  ",
        ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    summary = run(source, out, FakeLLM(context=50))
    found = rows(out)
    assert len(found) == 500
    assert (summary.ok, summary.failed, summary.exit_code) == (100, 400, 1)
    assert summary.errors == {"bad_role": 100, "context_overflow": 100, "invalid_json": 100, "missing_prompt": 100}
    assert {r["line"] for r in found if r.get("error", {}).get("code") == "missing_prompt"} == set(range(3, 600, 6))
    again = run(source, out, FakeLLM(context=50))
    assert (again.ok, again.failed, again.skipped, again.exit_code) == (0, 0, 500, 1)
    assert rows(out) == found
    retried = run(source, out, FakeLLM(context=500), retry_errors=True)
    assert (retried.ok, retried.failed, retried.skipped) == (100, 300, 100)
    assert len(rows(out)) == 500


def test_event_errors_and_unknown_codes(source: Path, out: Path) -> None:
    class Odd(RequestError):
        pass

    errors = {"1": RequestError("schema_invalid", "no"), "2": Odd("never_heard", "x"), "3": DeviceError("gone")}
    llm = FakeLLM(fail=lambda r: errors.get(r.id))
    assert run(source, out, llm).errors == {"internal": 2, "schema_invalid": 1}


def test_nothing_to_do_loads_nothing(source: Path, out: Path, tmp_path: Path) -> None:
    run(source, out)
    options = BatchOptions(str(source), str(out), seed=7, progress=False)
    assert run_batch(no_model, options).skipped == 20
    empty = write_lines(tmp_path / "empty", [])
    assert run_batch(no_model, BatchOptions(str(empty), str(tmp_path / "o2"), progress=False)).exit_code == 0
    bad = write_lines(tmp_path / "bad", [b"{"])
    assert run_batch(no_model, BatchOptions(str(bad), str(tmp_path / "o3"), progress=False)).exit_code == 1


def test_seed_of_a_row_depends_on_seed_and_id_alone(source: Path, out: Path, tmp_path: Path) -> None:
    run(source, out)
    few = write_lines(tmp_path / "few", [prompts(20)[13] | {"top_k": 4}, {"id": "own", "prompt": "a", "seed": 99}])
    run(few, tmp_path / "o2")
    seeds = {r["id"]: r["seed"] for r in rows(out)}
    assert {r["id"]: r["seed"] for r in rows(tmp_path / "o2")} == {"r13": seeds["r13"], "own": 99}
    assert len(set(seeds.values())) == 20
    run(source, tmp_path / "o3", seed=8)
    assert seeds["r3"] not in {r["seed"] for r in rows(tmp_path / "o3")}


def test_drawn_seed_is_kept_for_the_resume(source: Path, out: Path) -> None:
    first = run(source, out, seed=None)
    whole = {r["id"]: r["seed"] for r in rows(out)}
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:5]))
    assert run(source, out, seed=None).seed == first.seed
    assert {r["id"]: r["seed"] for r in rows(out)} == whole


def test_shards_share_the_lines(source: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"o{i}" for i in (1, 2, 3)]
    for i, o in enumerate(outs, 1):
        run(source, o, shard=parse_shard(f"{i}/3"))
    ids = [r["id"] for o in outs for r in rows(o)]
    assert sorted(ids) == sorted(p["id"] for p in prompts(20))
    for bad in ("3", "a/b", "4/3", "1/0", "-1/3", "1/2/3", "²/3"):
        with pytest.raises(UsageError):
            parse_shard(bad)


# ---- what is refused before anything loads or is touched ----------------------------------------------------------


def test_refusals(source: Path, out: Path, tmp_path: Path) -> None:
    refused(FileError, "does not exist", tmp_path / "none", out)
    refused(FileError, "folder", tmp_path, out)
    refused(FileError, "folder", source, tmp_path)
    refused(FileError, "Create it first", source, tmp_path / "no" / "out")
    refused(UsageError, "temperature", source, out, sampling={"temperature": -1})
    refused(UsageError, "seed", source, out, seed=-1)
    refused(UsageError, "give one", source, out, overwrite=True, retry_errors=True)
    refused(UsageError, "own files", source, out, summary=str(out))
    refused(UsageError, "own files", source, out, summary=str(out) + ".manifest.json")
    refused(UsageError, "own files", source, out, summary=str(source))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_out_that_is_in_is_refused(source: Path, tmp_path: Path) -> None:
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(source)
    hard.hardlink_to(source)
    for name in (source, link, hard):
        refused(UsageError, "the input itself", source, name, overwrite=True)
        refused(UsageError, "the input itself", name, source, force=True)


def test_repeated_ids_name_both_lines(tmp_path: Path, out: Path) -> None:
    lines = [{"id": "a", "prompt": "x"}, b"", {"custom_id": "b", "body": {}}, b"{bad", {"id": "a"}, {"id": 7}, {}]
    source = write_lines(tmp_path / "in", lines)
    refused(UsageError, r'lines 1 and 5 \(id "a"\); lines 6 and 7 \(id 7\)', source, out)
    assert not out.exists()
    write_lines(source, [{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "x"}, b"{bad", {"id": 3, "prompt": "x"}])
    assert run(source, out).failed == 1
    assert [(r["id"], "error" in r) for r in rows(out)].count((3, True)) == 1
    assert run(source, out).skipped == 4


def test_a_file_that_is_not_ours_is_left_alone(source: Path, out: Path) -> None:
    out.write_text("my notes\n")
    refused(UsageError, "no out.jsonl.manifest.json", source, out)
    assert run(source, out, force=True).ok == 20
    assert out.read_text().startswith("my notes\n")
    assert run(source, out, overwrite=True).ok == 20
    assert len(rows(out)) == 20


def test_changes_are_named(source: Path, out: Path, tmp_path: Path) -> None:
    model = {"name": "m", "revision": "1"}
    run(source, out, model=model, sampling={"temperature": 0.5, "stop": ("a",)})
    same: dict[str, Any] = {"model": model, "sampling": {"temperature": 0.5, "stop": ["a"]}}
    assert run(source, out, **same).skipped == 20
    changed = [
        (r'model.revision was "1" and is "2"', {"model": {"name": "m", "revision": "2"}}),
        (r"parameters.temperature was 0.5 and is 0.7", {"sampling": {"temperature": 0.7, "stop": ["a"]}}),
        (r"parameters.top_k was null and is 3", {"sampling": same["sampling"] | {"top_k": 3}}),
        (r"parameters.stop", {"sampling": {"temperature": 0.5}}),
        (r"parameters.keep_input was false and is true", {"keep_input": True}),
        (r'shard was null and is "1/2"', {"shard": (1, 2)}),
        (r"seed was 7 and is 8", {"seed": 8}),
    ]
    for match, options in changed:
        refused(UsageError, match, source, out, **(same | options))
    assert run(source, out, **(same | {"seed": 8}), force=True).skipped == 20
    data = source.read_bytes()
    source.write_bytes(data[:-20])
    refused(UsageError, "the input had", source, out, **(same | {"seed": 8}))
    source.write_bytes(data.replace(b"hello", b"HELLO", 1))
    refused(UsageError, "no longer the same", source, out, **(same | {"seed": 8}))


def test_input_may_grow_but_not_within_a_line(source: Path, out: Path) -> None:
    run(source, out)
    with open(source, "ab") as f:
        f.write(b'{"id": "new", "prompt": "a"}')
    assert run(source, out).ok == 1
    with open(source, "ab") as f:
        f.write(b' \r\n{"id": "newer", "prompt": "a"}')
    assert run(source, out).ok == 1
    with open(source, "ab") as f:
        f.write(b"oops\n")
    refused(UsageError, "line 22 of the input, then its unfinished last one", source, out)


def test_two_processes_on_one_out(source: Path, out: Path) -> None:
    lock = Lock(out)
    refused(UsageError, "being written by another", source, out)
    lock.release()
    assert run(source, out).ok == 20
    stale = out.with_name(".out.jsonl.minicpm-lock")
    stale.write_bytes(b"")  # left by a killed process
    assert run(source, out).skipped == 20
    assert not stale.exists()


# ---- resume -------------------------------------------------------------------------------------------------------


def test_cut_at_every_byte_nothing_is_lost_doubled_or_torn(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # 2,000 of them take 5 s and are not what this is about
    lines = [{"id": "é\u2028😀", "prompt": "世界 a"}, {"prompt": "b"}, b"{bad", {"custom_id": "o", "body": {}}]
    source = write_lines(tmp_path / "in", [{"id": "first", "prompt": "x"}, *lines])
    run(source, out)
    whole, expected = out.read_bytes(), sorted(out.read_bytes().splitlines())
    assert len(expected) == 5
    for size in range(len(whole)):
        out.write_bytes(whole[:size])
        summary = run(source, out)
        assert sorted(out.read_bytes().splitlines()) == expected, size
        kept = whole[:size].count(b"\n") + (whole[size : size + 1] == b"\n")
        assert summary.skipped == kept


def test_rows_that_fail_without_an_id_are_not_run_again(tmp_path: Path, out: Path) -> None:
    deep = b'{"id": "deep", "prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    source = write_lines(tmp_path / "in", [{"prompt": None}, {"id": 2, "prompt": ""}, b"null", deep, {"id": []}])
    assert run(source, out).failed == 5
    whole = rows(out)
    assert [r["id"] for r in whole] == [1, 2, 3, 4, 5]
    assert run(source, out).skipped == 5
    assert run(source, out, retry_errors=True).failed == 5
    assert rows(out) == whole


def test_zeros_of_a_power_cut_are_torn(source: Path, out: Path) -> None:
    run(source, out)
    expected = sorted(out.read_bytes().splitlines())
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:7]) + bytes(4096))
    assert run(source, out).skipped == 7
    assert sorted(out.read_bytes().splitlines()) == expected


def test_a_bad_row_in_the_middle_is_named(source: Path, out: Path) -> None:
    run(source, out)
    data = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*data[:3], b'{"id": 1, "te{"id": 2}\n', *data[4:]]))
    refused(FileError, "Line 4 of .* is no output row", source, out)
    assert run(source, out, force=True).ok == 1


def test_retry_errors_replaces_the_old_rows(source: Path, out: Path) -> None:
    run(source, out, FakeLLM(fail=lambda r: RequestError("internal", "x") if int(r.id) % 4 == 0 else None))
    assert sum("error" in r for r in rows(out)) == 5
    kept = run(source, out, FakeLLM())
    assert (kept.skipped, kept.earlier_errors, kept.exit_code) == (20, 5, 1)
    out.chmod(0o640)
    summary = run(source, out, retry_errors=True)
    assert (summary.ok, summary.skipped, summary.exit_code) == (5, 15, 0)
    assert sorted(r["id"] for r in rows(out)) == sorted(p["id"] for p in prompts(20))
    assert out.stat().st_mode & 0o777 == 0o640


def test_symlink_is_written_through(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    out.symlink_to(tmp_path / "real" / "o")
    run(source, out, FakeLLM(fail=lambda r: RequestError("internal", "x") if r.id == "1" else None))
    assert run(source, out, retry_errors=True).ok == 1
    assert out.is_symlink()
    assert len(rows(tmp_path / "real" / "o")) == 20
    assert run(source, tmp_path / "real" / "o").skipped == 20


def test_engine_failure_keeps_what_is_finished(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Dying(FakeLLM):
        def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
            for n, event in enumerate(super().stream(requests)):
                if n == 30:
                    raise DeviceError("the GPU fell off")
                yield event

    llm = Dying()
    with pytest.raises(DeviceError):
        run(source, out, llm, progress=True)
    said = capsys.readouterr().err
    assert "are kept in" in said
    assert "Run the same command again" in said
    assert llm.closed
    done = len(rows(out))
    assert 0 < done < 20
    assert run(source, out).skipped == done
    with pytest.raises(ModelNotFound):
        run_batch(
            lambda: (_ for _ in ()).throw(ModelNotFound("no")),
            BatchOptions(str(source), str(out) + "2", progress=False),
        )


def test_unfinished_rows_are_an_error_not_a_loss(source: Path, out: Path) -> None:
    class Forgetful(FakeLLM):
        def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
            yield from (e for e in super().stream(requests) if e.id != "5")

    with pytest.raises(Exception, match="1 rows unfinished"):
        run(source, out, Forgetful())
    assert run(source, out).ok == 1


def _signal_after_a_row(out: Path, number: int) -> None:
    while not (out.exists() and b"\n" in out.read_bytes()):
        time.sleep(0.002)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_keep_what_is_finished(source: Path, out: Path, tmp_path: Path, number: int) -> None:
    llm = FakeLLM(delay=0.02)
    threading.Thread(target=_signal_after_a_row, args=(out, number), daemon=True).start()
    with pytest.raises(Interrupted, match="Run the same command again") as caught:
        run(source, out, llm, summary=str(tmp_path / "s.json"))
    assert caught.value.exit_code == 130
    assert llm.closed
    assert json.loads((tmp_path / "s.json").read_text())["interrupted"]
    done = len(rows(out))
    assert 0 < done < 20
    assert run(source, out).ok == 20 - done
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_rows_reach_the_disk(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    monkeypatch.setattr("minicpm_cli.batch.syncs.SECONDS", 0.0)
    run(source, out)
    assert len(synced) > 3  # one at a time, beside the run
    assert synced[-1] == out.stat().st_size


def test_an_output_that_is_taken_away_is_noticed(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicpm_cli.batch.syncs.SECONDS", 0.0)

    def answer(request: Request) -> str:
        if request.id == "9":
            out.unlink()
        return "ok"

    with pytest.raises(FileError, match="removed or replaced"):
        run(source, out, FakeLLM(answer=answer))


# ---- real processes -----------------------------------------------------------------------------------------------

_CHILD = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from fakes import FakeLLM
from minicpm_cli.batch.options import BatchOptions
from minicpm_cli.batch.run import run_batch
from minicpm_cli.errors import MinicpmError
{setup}
try:
    options = BatchOptions(sys.argv[1], sys.argv[2], seed=7, progress=False)
    s = run_batch(lambda: FakeLLM(delay={delay}), options)
except MinicpmError as e:
    print(e, file=sys.stderr)
    sys.exit(e.exit_code)
sys.exit(s.exit_code)
"""


def child(
    source: Path | str, out: Path | str, *, setup: str = "", delay: float = 0, **more: Any
) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    code = _CHILD.format(root=str(root), tests=str(root / "tests"), setup=setup, delay=delay)
    return subprocess.Popen([sys.executable, "-c", code, str(source), str(out)], stderr=subprocess.PIPE, **more)


KILLS = 30


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_killed_at_random_moments(tmp_path: Path, out: Path) -> None:
    """Each child is killed a little after its first new row; what it had reported stays."""
    source = write_lines(tmp_path / "in", [*prompts(400), b"{bad"])
    alone = tmp_path / "alone"
    run(source, alone)
    kills, sizes = 0, 0
    for attempt in range(10 * KILLS):
        process = child(source, out, delay=0.0005)
        start = out.stat().st_size if out.exists() else 0
        while process.poll() is None and (not out.exists() or out.stat().st_size <= start):
            time.sleep(0.002)
        time.sleep((attempt * 7 % 13) / 1000)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
        data = out.read_bytes()
        assert data.count(b"\n") >= sizes
        sizes = data.count(b"\n")
        if kills >= KILLS:
            break
    assert kills >= 10
    run(source, out)
    assert sorted(out.read_bytes().splitlines()) == sorted(alone.read_bytes().splitlines())


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_full_disk_leaves_whole_rows(source: Path, out: Path) -> None:
    """A limit on file size gives short writes and EFBIG, as a full disk gives ENOSPC."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))"
    process = child(source, out, setup=limit)
    _, err = process.communicate()
    assert process.returncode == 3, err
    assert b"Free some space and run the same command again" in err
    done = len(rows(out))
    assert 0 < done < 20
    assert out.stat().st_size <= 1500
    assert run(source, out).ok == 20 - done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_full_device_and_null_device(source: Path) -> None:
    refusal = pytest.raises(FileError, match="Free some space")
    with refusal:
        run(source, "/dev/full")
    assert run(source, "/dev/null").ok == 20


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_fifo_in_and_reader_that_leaves(tmp_path: Path, out: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: write_lines(fifo, prompts(30)))
    writer.start()
    assert run(fifo, out).ok == 30
    writer.join()
    process = child(write_lines(tmp_path / "in", prompts(300)), "-", delay=0.001, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["id"].startswith("r")
    process.stdout.close()
    assert process.stderr is not None
    assert b"BrokenPipeError" in process.stderr.read()  # the command line turns it into a quiet end
    process.stderr.close()
    assert process.wait() != 0


# ---- streams ------------------------------------------------------------------------------------------------------


class _Bytes:
    def __init__(self, data: bytes = b"") -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


def test_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = _Bytes()
    monkeypatch.setattr(sys, "stdin", _Bytes(b'{"prompt": "a"}\n\n{"prompt": "b"}'))
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run("-", "-").ok == 2
    monkeypatch.undo()
    assert sorted(json.loads(x)["id"] for x in stdout.buffer.getvalue().splitlines()) == [1, 3]


def test_stream_resumes_and_repeated_ids_are_error_rows(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    data = b'{"id": "a", "prompt": "x"}\n{bad\n{"id": "a", "prompt": "y"}\n{"id": "b", "prompt": "z"}\n'
    for expected in ((2, 2, 0), (0, 0, 4)):
        monkeypatch.setattr(sys, "stdin", _Bytes(data))
        summary = run("-", out)
        assert (summary.ok, summary.failed, summary.skipped) == expected
    assert sorted(str(r["id"]) for r in rows(out)) == ["2", "3", "a", "b"]
    out.write_bytes(b"".join(x for x in out.read_bytes().splitlines(keepends=True) if b'"text"' not in x))
    monkeypatch.setattr(sys, "stdin", _Bytes(data))
    assert run("-", out).ok == 2


# ---- order --------------------------------------------------------------------------------------------------------


def test_ordered_keeps_input_order(source: Path, out: Path, tmp_path: Path) -> None:
    ids = [p["id"] for p in prompts(20)]
    run(source, out)
    assert [r["id"] for r in rows(out)] != ids
    run(source, tmp_path / "o2", ordered=True)
    assert [r["id"] for r in rows(tmp_path / "o2")] == ids
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:9]))
    run(source, out, ordered=True)  # begun in order of completion
    assert [r["id"] for r in rows(out)] == ids
    assert run(source, out, ordered=True).skipped == 20


def test_ordered_retry_puts_rows_back_in_their_place(tmp_path: Path, out: Path) -> None:
    lines = [b"{bad", {"prompt": "a"}, {"id": 1, "prompt": "b"}, {"id": "x", "prompt": "c"}]
    source = write_lines(tmp_path / "in", lines)
    run(source, out, FakeLLM(fail=lambda r: RequestError("internal", "x") if r.id in "24" else None), ordered=True)
    run(source, out, ordered=True, retry_errors=True)
    assert [(r["id"], "error" in r) for r in rows(out)] == [(1, True), (2, False), (1, False), ("x", False)]


def test_order_window_holds_back_the_source(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "InOrder", lambda output: InOrder(output, window=3))
    running: list[int] = []

    class Watched(FakeLLM):
        def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
            for event in super().stream(requests):
                running.append(len(self.seen) - len(rows(out)))
                yield event

    slow_first = Watched(answer=lambda r: "w " * (100 if r.id == "1" else 1))
    run(source, out, slow_first, ordered=True)
    assert max(running) <= 4
    assert [r["id"] for r in rows(out)] == [p["id"] for p in prompts(20)]


@pytest.mark.parametrize(
    ("slow", "kept", "said"),
    [
        ("3", 2, r"Stopped after 2 rows; they are kept in .* \d more waited for the rows before them"),
        ("2", 1, r"Stopped after 1 row; it is kept in .* \d more waited for the rows before them"),
        ("1", 0, r"Stopped before a row was finished\. \d more waited for the rows before them"),
    ],
)
def test_a_stopped_run_says_what_is_kept(source: Path, out: Path, slow: str, kept: int, said: str) -> None:
    class Stopped(FakeLLM):
        def _events(self, request: Request) -> Any:
            if request.id == "9":
                raise KeyboardInterrupt
            return super()._events(request)

    with pytest.raises(Interrupted, match=said):
        run(source, out, Stopped(answer=lambda r: "w " * (100 if r.id == slow else 1)), ordered=True)
    assert len(rows(out)) == kept


@pytest.mark.parametrize(("device", "advised"), [("cuda:0", True), ("cpu", False)])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), DeviceError("broken")])
def test_a_gpu_that_fails_costs_a_run_that_need_not_end(
    source: Path, out: Path, device: str, advised: bool, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(FakeLLM):
        @property
        def info(self) -> LLMInfo:
            return replace(super().info, device=device)

        def _events(self, request: Request) -> Any:
            if request.id == "9":
                raise error
            return super()._events(request)

    with pytest.raises(type(error)):
        run(source, out, Broken(), progress=True)
    said = capsys.readouterr().err
    assert "Run the same command again to go on." in said
    assert ("With --gpus 1" in said) is (advised and isinstance(error, RuntimeError))


# ---- size ---------------------------------------------------------------------------------------------------------


def test_scan_of_many_lines_is_small(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", (b'{"id":"row-%d","prompt":"x"}' % i for i in range(100_000)))
    tracemalloc.start()
    with open(source, "rb") as f:
        assert scan_input(f, source).rows == 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # a million rows: 50 MB


def test_a_resume_of_many_rows_is_small(tmp_path: Path, out: Path) -> None:
    """Also where it has to put them in order: 40 bytes a row."""
    count = 20_000
    source = write_lines(tmp_path / "in", (b'{"id":%d,"prompt":"x"}' % i for i in range(count)))
    write_lines(out, (b'{"id":%d,"text":"x"}' % i for i in reversed(range(count))))
    tracemalloc.start()
    past = recover(out, drop_errors=False, lenient=False)
    assert (past.ok, len(past.done)) == (count, count)
    assert tracemalloc.get_traced_memory()[1] < 32 * count
    tracemalloc.reset_peak()
    assert restore_order(out, source, source.stat().st_size)
    assert tracemalloc.get_traced_memory()[1] < 60 * count
    tracemalloc.stop()
    assert [r["id"] for r in rows(out)] == list(range(count))


def test_run_is_flat(tmp_path: Path, out: Path) -> None:
    class Seen(list[Any]):
        def append(self, item: Any) -> None: ...

    def peak(count: int) -> int:
        source = write_lines(tmp_path / "in", ({"id": i, "prompt": "x" * 1000} for i in range(count)))
        tracemalloc.start()
        assert run(source, out, FakeLLM(seen=Seen()), overwrite=True).ok == count
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(50)
    few = peak(1000)
    assert peak(4000) < few + 200_000  # both fill the window


def test_one_line_of_50_mb(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "in", [{"id": "big", "prompt": "x" * 50_000_000}, {"prompt": "y"}])
    run(source, out, FakeLLM(answer=lambda r: "ok"))
    assert sorted(str(r["id"]) for r in rows(out)) == ["2", "big"]


def test_order_is_restored_with_rows_that_nobody_asked_for(tmp_path: Path, out: Path) -> None:
    """An OUT that --force appended to: notes of somebody else, a row whose line is gone, an id twice."""
    source = write_lines(tmp_path / "in", prompts(6))
    run(source, out)
    strange = b'{"id": "gone", "text": "x"}\n{"id": "r2", "text": "again"}\n'
    out.write_bytes(strange + b"".join(reversed(out.read_bytes().splitlines(keepends=True))))
    assert run(source, out, ordered=True, force=True).skipped == 6
    assert [r["id"] for r in rows(out)] == ["r0", "r1", "r2", "r2", "r3", "r4", "r5", "gone"]
    assert rows(out)[2]["text"] == "again"
    before = out.stat().st_ino
    run(write_lines(source, prompts(6)), out, ordered=True)
    assert len(rows(out)) == 8
    assert out.stat().st_ino != before  # strangers are looked for each time
