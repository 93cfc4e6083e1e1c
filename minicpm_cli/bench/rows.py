"""One measured number with all that one must know to compare it; as JSON, as a table, as the README's table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from minicpm_cli.errors import FileError

OUR_ENGINE = "minicpm-cli"
STEADY = 0.15  # a spread up to this is a machine's own noise; on a shared CPU runs were seen to differ tenfold


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and on what a number was measured; `versions` are of minicpm-cli, torch, transformers, triton."""

    device: str
    threads: int | None
    driver: str | None
    versions: Mapping[str, str]
    commit: str | None
    date: str
    model: str
    scheme: str
    engine: str = OUR_ENGINE


@dataclass(frozen=True, slots=True)
class Row:
    """The median of `runs` repetitions of one workload."""

    setting: Setting
    workload: str
    runs: tuple[float, ...]
    unit: str

    @property
    def value(self) -> float:
        return median(self.runs)

    @property
    def spread(self) -> float:
        """How far the runs lie apart, as a part of their median."""
        return (max(self.runs) - min(self.runs)) / self.value

    def to_json(self) -> str:
        measured = {"workload": self.workload, "value": _rounded(self.value), "unit": self.unit}
        return json.dumps(
            asdict(self.setting) | measured | {"runs": [_rounded(r) for r in self.runs]}, ensure_ascii=False
        )

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Raises FileError for what `to_json` did not write."""
        try:
            record: dict[str, Any] = json.loads(line)
            setting = Setting(**{f.name: record[f.name] for f in fields(Setting)})
            return cls(setting, record["workload"], tuple(record["runs"]), record["unit"])
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"not a row of `minicpm bench --json`: {line[:80]!r} ({error})") from error


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def read_rows(text: str) -> list[Row]:
    return [Row.from_json(line) for line in text.split("\n") if line.strip()]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each workload on the same device, model, scheme and engine, in order of first sight."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        kept[(*_line_key(row.setting), row.workload)] = row
    return list(kept.values())


def _line_key(setting: Setting) -> tuple[str, ...]:
    return (place(setting), setting.model, setting.scheme, setting.engine)


def place(setting: Setting) -> str:
    """The device, with its number of threads if it is a CPU."""
    return f"{setting.device}, {setting.threads} threads" if setting.threads else setting.device


def markdown_table(rows: Sequence[Row], workloads: Sequence[str]) -> str:
    """One line per device, model, scheme, engine, versions and date; one column per workload that has a value."""
    units = {row.workload: row.unit for row in rows}
    columns = [w for w in workloads if w in units]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in latest(rows):
        key = (*_line_key(row.setting), versions_text(row.setting), row.setting.date)
        lines.setdefault(key, {})[row.workload] = _cell(row)
    head = ["device", "model", "scheme", "engine", *(f"{w} ({units[w]})" for w in columns), "versions", "date"]
    table = [head, [":--"] * 4 + ["--:"] * len(columns) + [":--"] * 2]
    for (*what, versions, date), values in lines.items():
        table.append([*what, *(values.get(w, "") for w in columns), versions, date])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _cell(row: Row) -> str:
    """The median; with the range beside it where the runs lie too far apart to compare."""
    value = f"{_rounded(row.value):,g}"
    if row.spread <= STEADY:
        return value
    return f"{value} ({_rounded(min(row.runs)):,g} to {_rounded(max(row.runs)):,g})"


def versions_text(setting: Setting) -> str:
    driver = [f"driver {setting.driver}"] if setting.driver else []
    return ", ".join([f"{name} {version}" for name, version in setting.versions.items()] + driver)
