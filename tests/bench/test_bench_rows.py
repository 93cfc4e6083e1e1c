"""Rows survive JSON, and the table shows the newest of each, never another device's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from minicpm_cli.bench import machine
from minicpm_cli.bench.rows import Row, Setting, kernel_table, latest, markdown_table, read_rows
from minicpm_cli.errors import FileError

CPU = Setting(
    device="Some CPU",
    threads=2,
    driver=None,
    versions={"minicpm-cli": "0.1.0", "torch": "2.13.0"},
    commit="abc1234",
    date="2026-11-30",
    model="demo",
    scheme="Q4_1",
)
GPU = replace(CPU, device="Some GPU", threads=None, driver="580.1", model="minicpm5-1b", scheme="bf16")


def row(setting: Setting = CPU, workload: str = "decode", *runs: float) -> Row:
    return Row(setting, workload, runs or (10.0, 30.0, 20.0), "tok/s")


def test_a_row_survives_json() -> None:
    before = [row(), row(GPU, "prefill", 12340.0)]
    assert read_rows("".join(r.to_json() + "\n" for r in before)) == before


def test_json_names_everything_and_the_median() -> None:
    record = json.loads(row(CPU, "decode", 3.0, 1.0, 2.00004).to_json())
    assert record["value"] == 2.0
    assert record["runs"] == [3.0, 1.0, 2.0]
    assert {"device", "threads", "driver", "versions", "commit", "date", "model", "scheme", "engine"} <= set(record)
    assert (record["workload"], record["unit"]) == ("decode", "tok/s")


def test_a_cell_says_how_sure_it_is() -> None:
    cells = {(10.0, 10.1, 10.2): "10.1", (10.0, 10.2): "10.1 (2 runs)", (10.0, 20.0): "15 (10 to 20)", (5.0,): "5"}
    for runs, cell in cells.items():
        assert f"| {cell} |" in markdown_table([row(CPU, "decode", *runs)], ["decode"])


def test_the_spread_is_a_part_of_the_median() -> None:
    assert row(CPU, "decode", 10.0, 30.0, 20.0).spread == 1.0
    assert row(CPU, "decode", 5.0).spread == 0.0


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"device": 1}', "null"])
def test_a_foreign_line_is_refused(line: str) -> None:
    with pytest.raises(FileError, match="not a row"):
        read_rows(line)


def test_the_newest_row_of_a_workload_counts() -> None:
    old, new = row(CPU, "decode", 1.0), row(replace(CPU, date="2026-12-01", commit="def"), "decode", 2.0)
    assert latest([old, row(GPU, "decode", 9.0), new]) == [new, row(GPU, "decode", 9.0)]


def test_the_table_has_a_line_for_each_setting_and_a_column_for_each_workload_there() -> None:
    rows = [row(CPU, "ttft128", 1234.5), row(CPU, "decode", 20.0, 21.0, 19.5), row(GPU, "decode", 987654.0)]
    rows.append(row(replace(GPU, scheme="w4 g128"), "decode", 1300.0))
    assert markdown_table(rows, ["decode", "unmeasured", "ttft128"]).split("\n") == [
        "Some CPU, 2 threads, 2026-11-30: torch 2.13.0:",
        "",
        "| model | scheme | engine | decode (tok/s) | ttft128 (tok/s) | minicpm-cli |",
        "| :-- | :-- | :-- | --: | --: | :-- |",
        "| demo | Q4_1 | minicpm-cli | 20 | 1,234 | 0.1.0 |",
        "",
        "Some GPU, 2026-11-30: torch 2.13.0, driver 580.1:",
        "",
        "| model | scheme | engine | decode (tok/s) | minicpm-cli |",
        "| :-- | :-- | :-- | --: | :-- |",
        "| minicpm5-1b | bf16 | minicpm-cli | 987,700 | 0.1.0 |",
        "| minicpm5-1b | w4 g128 | minicpm-cli | 1,300 | 0.1.0 |",
    ]


def test_a_line_of_several_versions_names_what_the_fewer_measured() -> None:
    newer = replace(GPU, versions={"minicpm-cli": "0.2.0", "torch": "2.13.0"})
    rows = [row(GPU, "decode", 1.0), row(GPU, "load", 2.0), row(newer, "load", 3.0), row(GPU, "ttft128", 4.0)]
    last = markdown_table(rows, ["decode", "ttft128", "load"]).split("\n")[-1]
    assert last == "| minicpm5-1b | bf16 | minicpm-cli | 1 | 4 | 3 | 0.1.0; load: 0.2.0 |"
    rows += [row(newer, "decode", 5.0), row(GPU, "load", 7.0), row(newer, "ttft128", 6.0)]
    last = markdown_table(rows, ["decode", "ttft128", "load"]).split("\n")[-1]
    assert last == "| minicpm5-1b | bf16 | minicpm-cli | 5 | 6 | 7 | 0.2.0; load: 0.1.0 |"


def test_what_is_no_column_is_in_no_table() -> None:
    assert markdown_table([row(CPU, "throughput-8")], ["decode"]) == ""
    assert kernel_table([row(CPU, "decode")]) == ""


def test_operations_stand_beside_their_limits() -> None:
    norm = replace(row(GPU, "norm, 8 rows", 3000.0), unit="GB/s", limit=4000.0)
    assert read_rows(norm.to_json()) == [norm]
    assert kernel_table([row(CPU, "decode"), norm]).split("\n") == [
        "Some GPU, 2026-11-30: torch 2.13.0, driver 580.1:",
        "",
        "| sizes of | operation | rate | limit | part of it | minicpm-cli |",
        "| :-- | :-- | --: | --: | --: | :-- |",
        "| minicpm5-1b | norm, 8 rows | 3,000 GB/s | 4,000 | 75% | 0.1.0 |",
    ]


def test_the_table_does_not_hide_that_runs_differ() -> None:
    last = markdown_table([row(CPU, "decode", 10.0, 30.0, 20.0)], ["decode"]).split("\n")[-1]
    assert "| 20 (10 to 30) |" in last


def test_this_machine_is_named() -> None:
    here = machine.setting_for(torch.device("cpu"), "demo", "Q4_1")
    assert here.device
    assert here.threads == torch.get_num_threads()
    assert here.versions["torch"] == torch.__version__
    assert here.driver is None
    assert "triton" not in here.versions


def test_a_missing_program_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.driver_version() is None
    assert machine.commit() is None
