"""One measured number with all that one must know to compare it; as JSON, as a table, as the README's table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
    """The median of `runs` repetitions of one workload; `limit` is what the machine allows, where that was measured."""

    setting: Setting
    workload: str
    runs: tuple[float, ...]
    unit: str
    limit: float | None = None

    @property
    def value(self) -> float:
        return median(self.runs)

    @property
    def spread(self) -> float:
        """How far the runs lie apart, as a part of their median."""
        return (max(self.runs) - min(self.runs)) / self.value

    def to_json(self) -> str:
        measured: dict[str, Any] = {"workload": self.workload, "value": _rounded(self.value), "unit": self.unit}
        measured["runs"] = [_rounded(r) for r in self.runs]
        limit = {} if self.limit is None else {"limit": _rounded(self.limit)}
        return json.dumps(asdict(self.setting) | measured | limit, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Raises FileError for what `to_json` did not write."""
        try:
            record: dict[str, Any] = json.loads(line)
            setting = Setting(**{f.name: record[f.name] for f in fields(Setting)})
            return cls(setting, record["workload"], tuple(record["runs"]), record["unit"], record.get("limit"))
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
    """One line per model, scheme and engine, grouped by where it was measured; a column per workload with a value.

    Date and versions are named once a group, in a line above its table; our own, which changes more often, in a column.
    """
    units = {row.workload: row.unit for row in rows}
    columns = [w for w in workloads if w in units]
    parts = [
        f"{where}:\n\n" + _table(own, [w for w in columns if any(row.workload == w for row in own)], units)
        for where, own in _by_place([row for row in latest(rows) if row.workload in columns])
    ]
    return "\n\n".join(parts)


def kernel_table(rows: Sequence[Row]) -> str:
    """One line per operation that has a limit to stand beside, and the version of ours that was measured."""
    parts = []
    for where, own in _by_place([row for row in latest(rows) if row.limit is not None]):
        titles = ["sizes of", "operation", "rate", "limit", "part of it", OUR_ENGINE]
        table = [titles, [":--", ":--", "--:", "--:", "--:", ":--"]]
        for row in own:
            assert row.limit is not None
            cells = [row.setting.model, row.workload, f"{_cell(row)} {row.unit}", f"{_rounded(row.limit):,g}"]
            table.append([*cells, f"{row.value / row.limit:.0%}", row.setting.versions.get(OUR_ENGINE, "")])
        parts.append(f"{where}:\n\n{_lines(table)}")
    return "\n\n".join(parts)


def _by_place(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by device, date and the versions of what is not ours, as a line to put above them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        setting = row.setting
        others = {name: version for name, version in setting.versions.items() if name != OUR_ENGINE}
        where = f"{place(setting)}, {setting.date}: {versions_text(replace(setting, versions=others))}"
        groups.setdefault(where, []).append(row)
    return list(groups.items())


def _table(rows: Sequence[Row], columns: Sequence[str], units: Mapping[str, str]) -> str:
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    ours: dict[tuple[str, str, str], dict[str, list[str]]] = {}  # by line: the workloads that each version measured
    for row in rows:
        line = row.setting.model, row.setting.scheme, row.setting.engine
        lines.setdefault(line, {})[row.workload] = _cell(row)
        ours.setdefault(line, {}).setdefault(row.setting.versions.get(OUR_ENGINE, ""), []).append(row.workload)
    table = [["model", "scheme", "engine", *(f"{w} ({units[w]})" for w in columns), OUR_ENGINE]]
    table.append([":--"] * 3 + ["--:"] * len(columns) + [":--"])
    for line, values in lines.items():
        table.append([*line, *(values.get(w, "") for w in columns), _versions_of(ours[line])])
    return _lines(table)


def _versions_of(workloads: Mapping[str, Sequence[str]]) -> str:
    """The version that measured most, and those that measured the others, which are named."""
    first, *others = sorted(workloads, key=lambda version: -len(workloads[version]))
    return "; ".join([first, *(f"{', '.join(workloads[version])}: {version}" for version in others)])


def _lines(table: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _cell(row: Row) -> str:
    """The median; with the range beside it where the runs lie too far apart to compare, and told where two are all."""
    value = f"{_rounded(row.value):,g}"
    if row.spread <= STEADY:
        return f"{value} (2 runs)" if len(row.runs) == 2 else value
    return f"{value} ({_rounded(min(row.runs)):,g} to {_rounded(max(row.runs)):,g})"


def versions_text(setting: Setting) -> str:
    driver = [f"driver {setting.driver}"] if setting.driver else []
    return ", ".join([f"{name} {version}" for name, version in setting.versions.items()] + driver)
