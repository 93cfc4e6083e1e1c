"""What `minicpm bench` refuses before it loads anything, and the line it prints of a row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minicpm_cli.bench import command
from minicpm_cli.bench.command import BenchOptions, line, run_bench
from minicpm_cli.bench.rows import Row, Setting, read_rows
from minicpm_cli.bench.speed import Run
from minicpm_cli.cli.bench import _WORKLOADS
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings
from minicpm_cli.types import SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ("decode", "fast")}, "no workload is called 'fast'; choose from: decode, decode-long"),
        ({"against": "vllm"}, "choose from: transformers"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"requests": 0, "workloads": ("throughput",)}, "--requests is 0"),
        ({"requests": 8}, "--requests is for the workload throughput"),
        ({"devices": ("cuda:0",), "workloads": ("decode", "throughput")}, "are for the workload throughput"),
        ({"devices": ("cuda:0",)}, "are for the workload throughput"),
        (
            {"devices": ("cpu",), "workloads": ("throughput",), "against": "transformers"},
            "are for the workload throughput",
        ),
        ({"shape": "gpt-2"}, "choose one of: minicpm-2b"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchOptions(**{"load": LoadOptions(), **options}).checked()  # type: ignore[arg-type]


def test_the_usual_workloads_are_the_speeds() -> None:
    options = BenchOptions(LoadOptions()).checked()
    usual = ["decode", "decode-long", "ttft128", "ttft2048", "batch16", "batch64"]
    assert [w.name for w in options.speeds] == usual
    assert options.starts == []


def test_the_help_names_all_workloads() -> None:
    assert ", ".join(command.CHOICES) == _WORKLOADS
    assert command.CHOICES[: command.CHOICES.index("batch64") + 1] == command.USUAL


def test_a_shortened_throughput_is_named_so() -> None:
    (whole,) = BenchOptions(LoadOptions(), workloads=("throughput",)).checked().speeds
    (short,) = BenchOptions(LoadOptions(), workloads=("throughput",), requests=8).checked().speeds
    assert (whole.name, whole.batch) == ("throughput", 1024)
    assert (short.name, short.batch, short.help[:10]) == ("throughput-8", 8, "8 requests")


def test_each_engine_is_warmed_up_as_the_only_one_is() -> None:
    warm = []
    for devices in ((), ("cuda:0",), ("cuda:0", "cuda:1")):
        (throughput,) = BenchOptions(LoadOptions(), workloads=("throughput",), devices=devices).checked().speeds
        warm.append(throughput.warm)
    assert warm == [128, 128, 256]


def test_a_process_of_its_own_loads_as_asked() -> None:
    load = LoadOptions(quantize="w4", head_bits=8, kv_dtype="fp8", graphs=False, max_seqs=7)
    load = replace(load, max_batch_tokens=9, memory_fraction=0.5)
    expected = (
        "--device auto --dtype auto --quantize w4 --max-seqs 7 --max-batch-tokens 9 --kv-dtype fp8 --no-graphs "
        "--memory-fraction 0.5 --head-bits 8"
    )
    assert " ".join(BenchOptions(load).load_flags) == expected


def test_starts_and_speeds_are_told_apart() -> None:
    options = BenchOptions(LoadOptions(), workloads=("help", "decode", "load")).checked()
    assert [w.name for w in options.speeds] == ["decode"]
    assert options.starts == ["help", "load"]


SETTING = Setting("Some CPU", 2, None, {}, None, "2026-11-30", "demo", "Q4_1")


def test_a_line_has_value_spread_and_place() -> None:
    written = " ".join(line(Row(SETTING, "decode", (61.2, 60.8, 61.93), "tok/s")).split())
    assert written == "decode 61.2 tok/s (60.8 to 61.93, 3 runs) demo Q4_1 minicpm-cli on Some CPU, 2 threads"
    assert " tok/s  (1 run)  " in line(Row(SETTING, "throughput", (61.2,), "tok/s"))


class Fixed:
    """A subject whose engines take given seconds, run by run."""

    name, cfg = "demo", SimpleNamespace(vocab=100)
    host: float | None = None

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def setting(self, devices: Sequence[str] = ()) -> Setting:
        return SETTING if self.host is None else replace(SETTING, threads=None)

    def peer_setting(self, engine: str) -> Setting:
        return replace(SETTING, engine=engine)

    def runner(self) -> Fixed:
        self.left = iter(self.seconds)
        return self

    peer_runner = runner

    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        return Run(len(prompts[0]), params.max_tokens or 0, next(self.left), 100.0, 10, self.host)


def run(monkeypatch: pytest.MonkeyPatch, subject: Fixed, options: BenchOptions) -> tuple[str, str]:
    monkeypatch.setattr("minicpm_cli.bench.subject.open_subject", lambda *_: subject)
    out, err = io.StringIO(), io.StringIO()
    run_bench(options, Settings.load(environ={}), out, err)
    return out.getvalue(), err.getvalue()


def test_both_engines_give_rows_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(LoadOptions(), workloads=("ttft128",), against="transformers", json=True)
    out, err = run(monkeypatch, Fixed(9.0, 9.0, 2.0, 2.0, 2.0), options)
    rows = read_rows(out)
    assert [(row.setting.engine, row.value) for row in rows] == [("minicpm-cli", 2000.0), ("transformers", 2000.0)]
    assert "differ" not in err
    assert [text for text in err.splitlines() if "loading" in text] == [
        "minicpm: loading demo",
        "minicpm: loading demo for transformers",
    ]


def test_the_hosts_time_is_a_row_where_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, options = Fixed(*[1.0] * 5), BenchOptions(LoadOptions(), workloads=("decode",), json=True)
    subject.host = 0.02
    rows = read_rows(run(monkeypatch, subject, options)[0])
    assert [(row.workload, row.value, row.unit) for row in rows] == [("decode", 2.576, "tok/s"), ("host1", 2.0, "ms")]


def test_a_limit_stands_beside_the_value() -> None:
    assert "50% of 4000" in line(Row(SETTING, "norm", (2000.0,), "GB/s", 4000.0))


def test_unsteady_runs_are_said_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, Fixed(9.0, 9.0, 2.0, 2.0, 4.0), BenchOptions(LoadOptions(), workloads=("ttft128",)))
    assert "ttft128: the runs differ by 100%" in err
    assert "differ" not in out
