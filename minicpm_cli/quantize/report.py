"""What a quantization came to, for people and as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from minicpm_cli.units import size


class Quality(Protocol):
    """Of the quantized model against the original on held-out text; kl in nats, top1 a part of 1."""

    @property
    def ppl(self) -> float: ...
    @property
    def ref_ppl(self) -> float: ...
    @property
    def kl(self) -> float: ...
    @property
    def top1(self) -> float: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """A Quality that was kept."""

    ppl: float
    ref_ppl: float
    kl: float
    top1: float
    tokens: int

    @classmethod
    def of(cls, quality: Quality) -> Measured:
        return cls(quality.ppl, quality.ref_ppl, quality.kl, quality.top1, quality.tokens)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """How a layer fared. `error` is relative: of its output over the calibration tokens, to that of the weights it was
    solved for; or of its weights where there were no tokens. `note` says what is out of the ordinary."""

    name: str
    rows: int
    columns: int
    error: float
    tokens: int = 0
    damp: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes, planned and measured, of the device that quantizes and of the host; None where there is no telling.

    On a CPU both are the host's.
    """

    planned: int
    measured: int | None
    host_planned: int
    host_measured: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """Sizes in bytes, `seconds` of this run alone; `resumed` blocks came from an earlier one."""

    model: str
    output: str
    recipe: str
    device: str
    layers: Sequence[LayerReport]
    calibration: str
    calibration_tokens: int
    quality: Measured | None
    heldout: str
    source_bytes: int
    bytes: int
    bits_per_weight: float
    seconds: float
    resumed: int
    peak: Peak
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> list[LayerReport]:
        """Layers by their error, the largest first."""
        return sorted(self.layers, key=lambda layer: -layer.error)

    def rows(self) -> list[tuple[str, str]]:
        """The final table."""
        found = [("model", self.model), ("output", self.output), ("recipe", self.recipe)]
        if self.calibration_tokens:
            found.append(("calibration", f"{self.calibration}, {self.calibration_tokens} tokens"))
        if self.quality is not None:
            q = self.quality
            found.append(("perplexity", f"{q.ppl:.3f}, original {q.ref_ppl:.3f} ({self.heldout}, {q.tokens} tokens)"))
            found.append(("KL to the original", f"{q.kl:.4f} nats a token"))
            found.append(("top-1 agreement", f"{q.top1:.2%}"))
        was = size(self.source_bytes)
        found.append(("size", f"{size(self.bytes)}, {self.bits_per_weight:.2f} bits a weight (was {was})"))
        before = f", {self.resumed} blocks were done before" if self.resumed else ""
        found.append(("time", f"{self.seconds:.1f} s{before}"))
        found.append(("peak memory", self._peak()))
        return found

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Report:
        """The reverse of `record`."""
        quality = Measured(**record["quality"]) if record["quality"] else None
        layers = tuple(LayerReport(**layer) for layer in record["layers"])
        rest = {"quality": quality, "layers": layers, "peak": Peak(**record["peak"]), "notes": tuple(record["notes"])}
        return cls(**{**record, **rest})

    def _peak(self) -> str:
        on_device, host = (
            f"{size(measured) if measured is not None else 'not measured'} (planned {size(planned)})"
            for planned, measured in (
                (self.peak.planned, self.peak.measured),
                (self.peak.host_planned, self.peak.host_measured),
            )
        )
        return f"{self.device} {on_device}" + ("" if self.device == "cpu" else f", host {host}")
