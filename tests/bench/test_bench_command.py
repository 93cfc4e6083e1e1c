"""What `minicpm bench` refuses before it loads anything, and the line it prints of a row."""

from __future__ import annotations

import pytest

from minicpm_cli.bench.command import BenchOptions, line
from minicpm_cli.bench.rows import Row, Setting
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ("decode", "fast")}, "no workload is called 'fast'; choose from: decode, decode-long"),
        ({"against": "vllm"}, "choose from: transformers"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"shape": "minicpm5-1b", "workloads": ("start",)}, "give -m MODEL"),
        ({"shape": "gpt-2"}, "choose one of: minicpm-2b"),
        ({"load": LoadOptions(quantize="w4")}, "--quantize"),
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


def test_a_line_has_value_spread_and_place() -> None:
    setting = Setting("Some CPU", 2, None, {}, None, "2026-11-30", "demo", "Q4_1")
    assert line(Row(setting, "decode", (61.2, 60.8, 61.93), "tok/s")).split() == (
        [
            "decode",
            "61.2",
            "tok/s",
            "(60.8",
            "to",
            "61.93,",
            "3",
            "runs)",
            "demo",
            "Q4_1",
            "minicpm-cli",
            "on",
            "Some",
            "CPU,",
            "2",
            "threads",
        ]
    )
