"""Quality rows: through JSON and back, which are published, and the README's table of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minicpm_cli.bench.quality_rows import QualityRow, latest_quality, quality_table, read_quality
from minicpm_cli.bench.rows import Setting
from minicpm_cli.errors import FileError

SETTING = Setting("Some CPU", 2, None, {"minicpm-cli": "1.0"}, "abc1234", "2026-12-01", "demo", "fp32")
PLAIN = QualityRow(SETTING, "topics", 6, 512, None, False, 3066, 15.2426957, 2.345678912)
COMPARED = replace(
    PLAIN, ppl=18.76, against="demo", ref_ppl=15.24, kl=0.19876543, top1=0.8123456, bytes=1_234_567_890,
    bits_per_weight=4.651,
).quantized("w4 g64 sym", "gptq", "32x512 of text", 123.4)  # fmt: skip


@pytest.mark.parametrize("row", [PLAIN, COMPARED], ids=["plain", "compared"])
def test_a_row_survives_json(row: QualityRow) -> None:
    written = row.to_json()
    read = QualityRow.from_json(written)
    assert read.to_json() == written
    assert replace(read, ppl=row.ppl, seconds=row.seconds, kl=row.kl, top1=row.top1) == row


def test_json_is_flat_with_six_digits() -> None:
    record = json.loads(COMPARED.to_json())
    assert (record["kl"], record["top1"], record["seconds"]) == (0.198765, 0.812346, 2.34568)
    assert (record["bytes"], record["model"], record["scheme"]) == (1_234_567_890, "demo", "w4 g64 sym")


def test_quantizing_changes_what_is_said_of_the_model_alone() -> None:
    assert COMPARED.setting == replace(SETTING, scheme="w4 g64 sym")
    assert (COMPARED.method, COMPARED.calibration, COMPARED.quantize_seconds) == ("gptq", "32x512 of text", 123.4)
    assert COMPARED.quantized("w8", "rtn").calibration is None


@pytest.mark.parametrize("line", ["", "{}", "[]", "nonsense", '{"device": "x"}'])
def test_what_is_no_row_is_named(line: str) -> None:
    with pytest.raises(FileError, match="not a row of `minicpm eval --json`"):
        QualityRow.from_json(line)


def test_the_last_measurement_counts() -> None:
    rows = [PLAIN, COMPARED, replace(PLAIN, ppl=15.0), replace(COMPARED, calibration="self")]
    assert [row.ppl for row in latest_quality(rows)] == [15.0, 18.76, 18.76]
    assert read_quality("\n".join([row.to_json() for row in rows] + [""]))[2].ppl == 15.0


def test_the_table_leaves_out_what_is_not_known() -> None:
    lines = [
        [cell.strip() for cell in line.strip("| ").split(" |")] for line in quality_table([PLAIN, COMPARED]).split("\n")
    ]
    assert lines[0][:6] == ["model", "scheme", "method", "calibration", "perplexity", "KL"]
    assert [len(line) for line in lines] == [12] * 4
    assert lines[2][:10] == ["demo", "fp32", "", "", "15.24", "", "", "", "", ""]
    assert lines[3][:10] == [
        "demo", "w4 g64 sym", "gptq", "32x512 of text", "18.76", "0.199", "81.2%", "4.65", "1,235", "123",
    ]  # fmt: skip
    assert lines[3][10:] == ["minicpm-cli 1.0", "2026-12-01"]
