"""The counts of a run, as they grow and as they are reported at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from minicpm_cli.types import Usage


@dataclass(slots=True)
class Counts:
    """`total` rows are in the input (None: a stream); `skipped` were finished by an earlier run."""

    total: int | None = None
    skipped: int = 0
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def finished(self) -> int:
        """Rows of this run."""
        return self.ok + self.failed

    def add(self, usage: Usage) -> None:
        self.ok += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Rows and tokens are those of this run; `earlier_errors` counts failed rows that an earlier one left in OUT.

    `seconds` leave out the loading of the model.
    """

    ok: int
    failed: int
    skipped: int
    errors: Mapping[str, int]
    earlier_errors: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seconds: float
    seed: int
    output: str
    interrupted: bool = False

    @classmethod
    def of(
        cls, counts: Counts, earlier_errors: int, seconds: float, seed: int, output: str, interrupted: bool
    ) -> BatchSummary:
        return cls(
            counts.ok,
            counts.failed,
            counts.skipped,
            dict(sorted(counts.errors.items())),
            earlier_errors,
            counts.prompt_tokens,
            counts.completion_tokens,
            counts.cached_tokens,
            seconds,
            seed,
            output,
            interrupted,
        )

    @property
    def exit_code(self) -> int:
        """1 when OUT holds a failed row, be it of this run or of an earlier one."""
        return 1 if self.failed or self.earlier_errors else 0

    def rate(self, tokens: int) -> float:
        return tokens / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "rows": self.ok + self.failed,
            "prompt_tokens_per_second": round(self.rate(self.prompt_tokens), 3),
            "completion_tokens_per_second": round(self.rate(self.completion_tokens), 3),
        }

    def lines(self) -> list[str]:
        """What a person is told."""
        codes = ", ".join(f"{n} {code}" for code, n in self.errors.items())
        failed = f"{self.failed:,} failed ({codes})" if self.failed else "0 failed"
        skipped = f", {self.skipped:,} were done before" if self.skipped else ""
        said = [
            f"{self.ok + self.failed:,} rows: {self.ok:,} ok, {failed}{skipped}.",
            f"{self.prompt_tokens:,} tokens in ({self.rate(self.prompt_tokens):,.1f}/s), "
            f"{self.completion_tokens:,} out ({self.rate(self.completion_tokens):,.1f}/s), {self.seconds:,.1f} s.",
        ]
        if self.exit_code and self.output != "-":
            before = f", {self.earlier_errors:,} of them from earlier runs" if self.earlier_errors else ""
            said.append(
                f"{self.failed + self.earlier_errors:,} failed rows are in {self.output}{before}; "
                "--retry-errors runs them again."
            )
        return said
