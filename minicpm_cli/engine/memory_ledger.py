"""What runs took, beside what was planned for them: lines of JSON in the cache folder, so that a plan can say how far
earlier ones were off. No torch here.

Keeping it may not cost a run anything: a disk that is full, a lock that is held, a file that is torn are passed over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from minicpm_cli.model.config import ModelConfig

Phase = Literal["fixed", "load", "capture", "prefill", "decode"]
FILE = "memory.jsonl"
LARGEST = 1 << 20  # bytes of the file; beyond them the older half goes
PATIENCE = 0.2  # seconds to wait for another process
SHOWN = 20  # past measurements of a kind that an error is told from


@dataclass(frozen=True, slots=True)
class Kind:
    """What a measurement depends on beside the sizes: runs of one kind should be planned equally well."""

    model: str  # architecture and widths, as `shape_name` has them
    scheme: str
    kv: str
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes at the peak of a phase: `predicted`, `measured`, and `reserved` by the allocator (of the process on a CPU).

    `context`, `seqs` and `tokens` are the plan's.
    """

    kind: Kind
    phase: Phase
    predicted: int
    measured: int
    reserved: int
    context: int
    seqs: int
    tokens: int
    time: float = 0.0

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured: above 0 where too much was predicted."""
        return (self.predicted - self.measured) / self.measured if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class PastError:
    """Of a phase over `count` runs: the mean and the worst error, and the worst in bytes."""

    phase: Phase
    count: int
    mean: float
    worst: float
    worst_bytes: int


def record(folder: Path, lines: Iterable[Measured]) -> None:
    """Appends to the ledger in `folder`, whatever other processes do there."""
    text = "".join(json.dumps(asdict(line) | {"time": line.time or round(time.time(), 1)}) + "\n" for line in lines)
    if not text:
        return
    from filelock import FileLock, Timeout

    with suppress(OSError, Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{FILE}.lock", timeout=PATIENCE):
            _append(folder / FILE, text)


def past(folder: Path) -> list[Measured]:
    """The whole ledger, oldest first; what cannot be read is left out."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [found for line in text.splitlines() if (found := _parsed(line)) is not None]


def errors_of(kind: Kind, lines: Sequence[Measured]) -> list[PastError]:
    """How far plans for this kind of run were off, by phase; versions may differ, since there are many."""
    mine = [line for line in lines if _alike(line.kind, kind)]
    return list(_by_phase(mine))


def fixed_of(device: str, lines: Sequence[Measured]) -> int | None:
    """What the context on such a device took the last time that it was measured."""
    found = [line.measured for line in lines if line.phase == "fixed" and line.kind.device == device]
    return found[-1] if found else None


def shape_of(cfg: ModelConfig) -> str:
    """What tells the sizes of one model from another's: "MiniCPMForCausalLM 40x2304/5760"."""
    experts = f" of {cfg.moe.experts} experts" if cfg.moe else ""
    return f"{cfg.architecture} {cfg.layers}x{cfg.hidden_size}/{cfg.intermediate}{experts}"


def _alike(one: Kind, other: Kind) -> bool:
    return (one.model, one.scheme, one.kv, one.device) == (other.model, other.scheme, other.kv, other.device)


def _by_phase(lines: Sequence[Measured]) -> Iterator[PastError]:
    for phase in dict.fromkeys(line.phase for line in lines):
        found = [line for line in lines if line.phase == phase][-SHOWN:]
        worst = max(found, key=lambda line: abs(line.error))
        mean = sum(line.error for line in found) / len(found)
        yield PastError(phase, len(found), mean, worst.error, worst.predicted - worst.measured)


def _append(path: Path, text: str) -> None:
    if path.exists() and path.stat().st_size + len(text) > LARGEST:
        kept = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(kept[len(kept) // 2 :]), encoding="utf-8")
        fresh.replace(path)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _parsed(line: str) -> Measured | None:
    try:
        values: dict[str, Any] = json.loads(line)
        known = {f.name: values[f.name] for f in fields(Measured)}
        return Measured(**known | {"kind": Kind(**values["kind"])})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
