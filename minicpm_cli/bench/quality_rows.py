"""A model's quality with all that one must know to compare it; as JSON, as the README's table. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from minicpm_cli.bench.rows import Setting, versions_text
from minicpm_cli.errors import FileError

HEAD = (
    "model", "scheme", "method", "calibration", "perplexity", "KL", "top-1", "bits/weight", "MB", "quantized in (s)",
    "versions", "date",
)  # fmt: skip
TEXTS = 4  # columns before the numbers


@dataclass(frozen=True, slots=True)
class QualityRow:
    """Quality of `setting.model` on a text.

    `windows` of at most `window` tokens, `stride` apart (None: spaced, not sliding), `tokens` of them predicted in
    `seconds`; `kl` in nats and `top1` in 0..1 `against` another model whose perplexity is `ref_ppl`. `bytes` are the
    weights' files, and `bits_per_weight` is 8 bytes / parameters, embedding and head included. `method` ("gptq",
    "rtn", ...), `calibration` and `quantize_seconds` are known to whoever quantized.
    """

    setting: Setting
    text: str
    windows: int
    window: int
    stride: int | None
    bos: bool
    tokens: int
    ppl: float
    seconds: float
    against: str | None = None
    ref_ppl: float | None = None
    kl: float | None = None
    top1: float | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    method: str | None = None
    calibration: str | None = None
    quantize_seconds: float | None = None

    def to_json(self) -> str:
        """One line; floats with six significant digits."""
        own = {name: value for name, value in asdict(self).items() if name != "setting"}
        rounded = {name: float(f"{v:.6g}") if isinstance(v, float) else v for name, v in own.items()}
        return json.dumps(asdict(self.setting) | rounded, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> QualityRow:
        """Raises FileError for what `to_json` did not write."""
        try:
            record: dict[str, Any] = json.loads(line)
            setting = Setting(**{f.name: record[f.name] for f in fields(Setting)})
            return cls(setting, **{f.name: record[f.name] for f in fields(cls) if f.name != "setting"})
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"not a row of `minicpm eval --json`: {line[:80]!r} ({error})") from error

    def quantized(
        self, scheme: str, method: str, calibration: str | None = None, seconds: float | None = None
    ) -> QualityRow:
        """The same numbers with what only the quantizer knows."""
        setting = replace(self.setting, scheme=scheme)
        return replace(self, setting=setting, method=method, calibration=calibration, quantize_seconds=seconds)


def read_quality(text: str) -> list[QualityRow]:
    return [QualityRow.from_json(line) for line in text.split("\n") if line.strip()]


def latest_quality(rows: Iterable[QualityRow]) -> list[QualityRow]:
    """The last row of each model, scheme, method, calibration and text, in order of first sight."""
    kept: dict[tuple[str | None, ...], QualityRow] = {}
    for row in rows:
        kept[(row.setting.model, row.setting.scheme, row.method, row.calibration, row.text)] = row
    return list(kept.values())


def quality_table(rows: Sequence[QualityRow]) -> str:
    """One line a row; the text that it is about belongs into the words around the table."""
    lines = [HEAD, [":--"] * TEXTS + ["--:"] * (len(HEAD) - TEXTS - 2) + [":--"] * 2]
    lines += [_cells(row) for row in latest_quality(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: QualityRow) -> list[str]:
    setting = row.setting
    return [
        setting.model,
        setting.scheme,
        row.method or "",
        row.calibration or "",
        f"{row.ppl:.2f}",
        _shown(row.kl, "{:.3g}"),
        _shown(row.top1, "{:.1%}"),
        _shown(row.bits_per_weight, "{:.2f}"),
        _shown(row.bytes and row.bytes / 1e6, "{:,.0f}"),
        _shown(row.quantize_seconds, "{:,.0f}"),
        versions_text(setting),
        setting.date,
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
