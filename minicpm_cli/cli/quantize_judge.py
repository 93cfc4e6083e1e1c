"""Joins `bench`, which knows how quality is measured, and `quantize`, which has something to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minicpm_cli.bench import heldout
from minicpm_cli.bench.quality import Comparison, Predictor, Window, compare
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The built-in text's held-out windows."""

    name: str
    windows: Sequence[Window]

    @classmethod
    def of(cls, tokenizer: Tokenizer, cfg: ModelConfig) -> HeldOut | None:
        """None for a model whose context is too short for the windows."""
        if cfg.context < heldout.SIZE:
            return None
        return cls(heldout.name(), heldout.heldout(tokenizer))

    def compare(self, model: Predictor, reference: Predictor) -> Comparison:
        return compare(model, reference, list(self.windows))
