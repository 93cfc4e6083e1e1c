"""How many sequences a model writes at once when it samples its own calibration text. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.calibration import Amount

PAGE = 16
CACHE_BYTES = 480 << 20  # of keys and values: the promise of one block's memory must hold while sampling, too
SEATS, SHORTEST = 64, 128  # sequences at once, and the length below which there are fewer of them
SAMPLED_BYTES = 2  # of a weight and an activation: bf16
PLAIN_BYTES = 2_000_000_000  # of plain weights; larger models write in 4 bits


@dataclass(frozen=True, slots=True)
class Seating:
    """Seats for so many sequences of so many tokens."""

    seats: int
    length: int

    @classmethod
    def of(cls, cfg: ModelConfig, itemsize: int, wanted: Amount) -> Seating:
        room = CACHE_BYTES // cfg.kv_bytes_per_token(itemsize)
        length = min(wanted.seqlen, cfg.context, max(SHORTEST, min(room, wanted.tokens) // SEATS))
        return cls(max(1, min(SEATS, room // length, -(-wanted.tokens // length))), length)

    @property
    def pages(self) -> int:
        """With the dummy."""
        return 1 + self.seats * (-(-self.length // PAGE) + 1)

    @property
    def tokens(self) -> int:
        return self.pages * PAGE


def sampled_in(cfg: ModelConfig) -> str | None:
    """The scheme to load the model in; None: plain."""
    return "w4" if cfg.parameters * SAMPLED_BYTES > PLAIN_BYTES else None
