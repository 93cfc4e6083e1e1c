"""The counts of a run, as they grow and as they are reported at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from minicpm_cli.types import Usage


@dataclass(slots=True)
class Counts:
    """`total` rows are in the input (None: a stream); `skipped` were finished by an earlier run.

    Tokens are those of finished rows; `seen_*` those of all, rows that still run among them.
    """

    total: int | None = None
    skipped: int = 0
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seen_prompt_tokens: int = 0
    seen_completion_tokens: int = 0

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


def count_of(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"


@dataclass(frozen=True, slots=True)
class Host:
    """What the rows ran on, None where no row needed a model or it has no GPU."""

    model: str | None = None
    device: str | None = None
    load_seconds: float | None = None
    gpu_memory_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Rows and tokens are those of this run; `earlier_errors` counts failed rows that an earlier one left in OUT.

    `total` rows are in the input, None for a stream. `seconds` leave out the loading of the model.
    """

    total: int | None
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
    host: Host = Host()

    @classmethod
    def of(
        cls, counts: Counts, host: Host, earlier_errors: int, seconds: float, seed: int, output: str, interrupted: bool
    ) -> BatchSummary:
        return cls(
            counts.total,
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
            host,
        )

    @property
    def exit_code(self) -> int:
        """1 when OUT holds a failed row, be it of this run or of an earlier one."""
        return 1 if self.failed or self.earlier_errors else 0

    @property
    def cache_hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def rate(self, tokens: int) -> float:
        return tokens / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        own = asdict(self)
        host = own.pop("host")
        return own | {
            "rows": self.ok + self.failed,
            "rows_per_second": round(self.rate(self.ok + self.failed), 3),
            "prompt_tokens_per_second": round(self.rate(self.prompt_tokens), 3),
            "completion_tokens_per_second": round(self.rate(self.completion_tokens), 3),
            "cache_hit_rate": round(self.cache_hit_rate, 4),
            **host,
        }

    def lines(self) -> list[str]:
        """What a person is told."""
        codes = ", ".join(f"{n:,} {code}" for code, n in self.errors.items())
        failed = f"{self.failed:,} failed ({codes})" if self.failed else "0 failed"
        skipped = f", {self.skipped:,} were done before" if self.skipped else ""
        cached = f", {self.cache_hit_rate:.0%} of them cached" if self.cached_tokens else ""
        peak = self.host.gpu_memory_peak_bytes
        memory = "" if peak is None else f", at most {peak / 1e9:,.1f} GB of GPU memory"
        said = [f"{count_of(self.ok + self.failed)}: {self.ok:,} ok, {failed}{skipped}."]
        if self.prompt_tokens:
            said.append(
                f"{self.prompt_tokens:,} tokens in ({self.rate(self.prompt_tokens):,.1f}/s){cached}, "
                f"{self.completion_tokens:,} out ({self.rate(self.completion_tokens):,.1f}/s), "
                f"{self.seconds:,.1f} s{memory}."
            )
        if self.exit_code and self.output != "-":
            before = f", {self.earlier_errors:,} from earlier runs" if self.earlier_errors else ""
            count = self.failed + self.earlier_errors
            found = "1 failed row is" if count == 1 else f"{count:,} failed rows are"
            said.append(f"{found} in {self.output}{before}; --retry-errors runs what failed again.")
        return said
