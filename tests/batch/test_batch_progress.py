"""What a run says while it goes on: a bar that fits the terminal, lines elsewhere, and the summary."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pyte
import pytest
from batch_tools import prompts, run, write_lines

from fakes import FakeLLM
from minicpm_cli.batch import progress as progress_module
from minicpm_cli.batch.progress import Bar, Lines, Pace, Quiet, choose_progress, status
from minicpm_cli.batch.summary import Counts


def counts(**more: int) -> Counts:
    found = Counts(total=500, skipped=100, ok=98, seen_prompt_tokens=10_000, seen_completion_tokens=500)
    found.errors["internal"] = 2
    for name, value in more.items():
        setattr(found, name, value)
    return found


def pace(*moments: float) -> Pace:
    clock = iter(moments)
    last = [moments[-1]]
    return Pace(lambda: next(clock, last[0]))


def test_status_says_how_far_and_how_fast() -> None:
    whole = "200/500 rows, 2 failed, 1,000 tok/s in, 50 out, 0:00:30 left"
    assert status(counts(), pace(0, 10)) == whole
    assert status(Counts(), pace(0)) == "0 rows, 0 failed, 0 tok/s in, 0 out"
    assert status(Counts(total=3), pace(0)) == "0/3 rows, 0 failed, 0 tok/s in, 0 out"
    assert status(counts(ok=0), pace(0, 10)).endswith("out")


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (60, "200/500 rows, 2 failed, 1,000 tok/s in, 50 out, 0:00:30 left"),
        (59, "200/500 rows, 2 failed, 0:00:30 left"),
        (30, "200/500 rows, 2 failed"),
        (20, "200/500 rows"),
        (1, "200/500 rows"),
    ],
)
def test_a_narrow_terminal_gets_the_parts_that_fit(width: int, said: str) -> None:
    assert status(counts(), pace(0, 10), width) == said


def test_the_pace_is_that_of_the_last_ten_seconds() -> None:
    at = [0.0]
    walked = Pace(lambda: at[0])
    for second in range(1, 61):
        at[0] = float(second)
        tokens = 100 * second if second <= 30 else 3000 + 700 * (second - 30)
        rates = walked.tokens(Counts(seen_prompt_tokens=tokens, seen_completion_tokens=second))
    assert rates == (700.0, 1.0)


def test_lines_come_by_the_clock_though_nothing_happens() -> None:
    stream = io.StringIO()
    lines = Lines(stream, seconds=0.02)
    lines.start(counts)
    end = time.monotonic() + 20
    while stream.getvalue().count("\n") < 3 and time.monotonic() < end:
        time.sleep(0.01)
    lines.stop()
    said = stream.getvalue().splitlines()
    assert len(said) >= 3
    assert all(line.startswith("200/500 rows, 2 failed, ") for line in said)


def test_a_stderr_that_is_gone_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    lines = Lines(Gone(), seconds=0.001)
    lines.start(counts)
    time.sleep(0.02)
    lines.say("x")
    lines.stop()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(text: str, width: int) -> pyte.Screen:
    screen = pyte.Screen(width, 10)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return screen


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_the_bar_takes_one_line_of_any_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(progress_module, "_DRAWS", 50)
    terminal = _Terminal()
    bar = Bar(terminal)
    bar.start(counts)
    bar.say("note [bold]kept[/bold]")
    time.sleep(0.1)
    drawn = [line.rstrip() for line in screen_of(terminal.getvalue(), width).display]
    bar.stop()
    at = drawn.index(next(line for line in drawn if "200/500 rows" in line))
    assert [line for line in drawn[at + 1 :] if line] == []
    assert "note [bold]kept[/bold]".startswith(drawn[0])
    assert ("━" in drawn[at]) == (width >= 60)
    after = [line.rstrip() for line in screen_of(terminal.getvalue(), width).display]
    assert not any("rows" in line for line in after)  # it leaves nothing behind


def test_which_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose_progress(False, _Terminal()), Quiet)
    assert isinstance(choose_progress(True, _Terminal()), Bar)
    assert isinstance(choose_progress(True, _Terminal(), plain=True), Lines)
    assert isinstance(choose_progress(True, io.StringIO()), Lines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_progress(True, _Terminal()), Lines)


def test_a_run_without_a_terminal_says_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module.Lines.__init__, "__defaults__", (0.05,))
    source = write_lines(tmp_path / "in", prompts(40))
    assert run(source, tmp_path / "out", FakeLLM(delay=0.002), progress=True).ok == 40
    said = capsys.readouterr().err.splitlines()
    assert said
    assert "/40 rows, 0 failed, " in said[-1]
    assert not any(thread.name.startswith("batch") for thread in threading.enumerate())


def test_the_speed_is_that_of_the_answers_and_not_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines take their time to end."""
    llm = FakeLLM()
    monkeypatch.setattr(llm, "close", lambda: time.sleep(1.0))
    begun = time.monotonic()
    done = run(write_lines(tmp_path / "in", prompts(3)), tmp_path / "out", llm)
    assert done.seconds < 0.9 < time.monotonic() - begun


def test_the_summary_has_what_a_report_needs(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [*prompts(20), b"{bad"])

    done = run(source, tmp_path / "out", FakeLLM(gpu_peak_bytes=12_345_678_901), summary=str(tmp_path / "s.json"))
    written = json.loads((tmp_path / "s.json").read_text())
    expected = {"total": 21, "rows": 21, "ok": 20, "failed": 1, "skipped": 0, "errors": {"invalid_json": 1}}
    assert {key: written[key] for key in expected} == expected
    assert (written["model"], written["device"], written["load_seconds"]) == ("fake", "cpu", 0.25)
    assert written["gpu_memory_peak_bytes"] == 12_345_678_901
    assert written["prompt_tokens"] > 0
    assert written["cached_tokens"] == written["cache_hit_rate"] == 0
    assert written["seconds"] > 0
    assert written["rows_per_second"] == pytest.approx(21 / written["seconds"], abs=1e-3)
    assert "at most 12.3 GB of GPU memory" in done.lines()[1]
    assert done.lines()[0] == "21 rows: 20 ok, 1 failed (1 invalid_json)."
    again = run(source, tmp_path / "out", summary=str(tmp_path / "s.json"))
    assert again.lines()[0] == "0 rows: 0 ok, 0 failed, 21 were done before."
    assert not any("tokens" in line for line in again.lines())  # of a run that did nothing
    written = json.loads((tmp_path / "s.json").read_text())
    assert (written["skipped"], written["model"], written["gpu_memory_peak_bytes"]) == (21, None, None)
