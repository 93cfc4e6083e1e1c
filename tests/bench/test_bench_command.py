"""What `minicpm bench` refuses before it loads anything, and the line it prints of a row."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minicpm_cli.bench.command import BenchOptions, line, run_bench
from minicpm_cli.bench.rows import Row, Setting, read_rows
from minicpm_cli.bench.speed import Run
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ("decode", "fast")}, "no workload is called 'fast'; choose from: decode, decode-long"),
        ({"against": "vllm"}, "choose from: transformers"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"shape": "minicpm5-1b", "workloads": ("start",)}, "give -m MODEL"),
        ({"shape": "gpt-2"}, "choose one of: minicpm-2b"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchOptions(**{"load": LoadOptions(), **options}).checked()  # type: ignore[arg-type]


def test_the_usual_workloads_are_the_speeds() -> None:
    options = BenchOptions(LoadOptions()).checked()
    assert [w.name for w in options.speeds] == ["decode", "decode-long", "prefill", "batch16", "batch64"]
    assert options.starts == []


def test_starts_and_speeds_are_told_apart() -> None:
    options = BenchOptions(LoadOptions(), workloads=("help", "decode", "start")).checked()
    assert [w.name for w in options.speeds] == ["decode"]
    assert options.starts == ["help", "start"]


SETTING = Setting("Some CPU", 2, None, {}, None, "2026-11-30", "demo", "Q4_1")


def test_a_line_has_value_spread_and_place() -> None:
    written = " ".join(line(Row(SETTING, "decode", (61.2, 60.8, 61.93), "tok/s")).split())
    assert written == "decode 61.2 tok/s (60.8 to 61.93, 3 runs) demo Q4_1 minicpm-cli on Some CPU, 2 threads"


class Fixed:
    """A subject whose engines take given seconds, run by run."""

    name, cfg = "demo", SimpleNamespace(vocab=100)

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def setting(self) -> Setting:
        return SETTING

    def peer_setting(self, engine: str) -> Setting:
        return replace(SETTING, engine=engine)

    def runner(self, workloads: object = None) -> Fixed:
        self.left = iter(self.seconds)
        return self

    peer_runner = runner

    def run(self, prompts: list[tuple[int, ...]], new: int) -> Run:
        return Run(len(prompts[0]), new, next(self.left), 100.0)


def run(monkeypatch: pytest.MonkeyPatch, subject: Fixed, options: BenchOptions) -> tuple[str, str]:
    monkeypatch.setattr("minicpm_cli.bench.subject.open_subject", lambda *_: subject)
    out, err = io.StringIO(), io.StringIO()
    run_bench(options, Settings.load(environ={}), out, err)
    return out.getvalue(), err.getvalue()


def test_both_engines_give_rows_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(LoadOptions(), workloads=("prefill",), against="transformers", json=True)
    out, err = run(monkeypatch, Fixed(9.0, 9.0, 2.0, 2.0, 2.0), options)
    rows = read_rows(out)
    assert [(row.setting.engine, row.value) for row in rows] == [("minicpm-cli", 256.0), ("transformers", 256.0)]
    assert "differ" not in err


def test_unsteady_runs_are_said_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, Fixed(9.0, 9.0, 2.0, 2.0, 4.0), BenchOptions(LoadOptions(), workloads=("prefill",)))
    assert "prefill: the runs differ by 50%" in err
    assert "differ" not in out
