"""Accounts for every tensor of a checkpoint: asked for or not, there or not, of the right shape and type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig

SHOWN = 8
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


class Ledger:
    """The names in the files under `where` and which of them were used."""

    def __init__(self, where: Path, cfg: ModelConfig, names: Iterable[str]) -> None:
        self.where, self.cfg = where, cfg
        self.names = set(names)
        self._used: set[str] = set()

    def use(self, name: str) -> None:
        if name not in self.names:
            raise self.missing(name)
        self._used.add(name)

    def ignore(self, name: str) -> None:
        self._used.add(name)

    def missing(self, name: str) -> WeightsError:
        return WeightsError(
            f"{self.where} has no tensor {name}{self._also_missing(name)}. "
            "The files are incomplete or belong to another config.json; fetch them again."
        )

    def check_shape(self, file: Path, name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if actual != expected:
            raise WeightsError(
                f"{file}: tensor {name} has shape {_dims(actual)}, expected {_dims(expected)} by the model's config"
                f"{self._keys(actual, expected)}"
            )

    def finish(self) -> None:
        left = sorted(self.names - self._used)
        if left:
            raise WeightsError(
                f"{self.where} holds {len(left)} tensors that a {self.cfg.architecture} of this config lacks: "
                f"{shortened(left)}. The weights belong to another model, or config.json does (num_hidden_layers?)."
            )

    def _also_missing(self, name: str) -> str:
        """Where else the same part is missing: one torn layer reads differently from a wrong name."""
        match = _LAYER.match(name)
        if not match:
            return ""
        part = match[2]
        absent = [i for i in range(self.cfg.layers) if f"model.layers.{i}.{part}" not in self.names]
        return f" (missing in {len(absent)} of {self.cfg.layers} layers: {shortened([str(i) for i in absent])})"

    def _keys(self, actual: tuple[int, ...], expected: tuple[int, ...]) -> str:
        """The config keys that the disagreeing sizes come from."""
        sizes = _config_sizes(self.cfg)
        pairs = [(a, e) for a, e in zip(actual, expected, strict=False) if a != e]
        known = [f"{' or '.join(sizes[e])} is {e}, the file says {a}" for a, e in pairs if e in sizes]
        return f" ({'; '.join(known)})" if known else ""


def _config_sizes(cfg: ModelConfig) -> dict[int, list[str]]:
    named = {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate,
        "num_attention_heads x head_dim": cfg.heads * cfg.head_dim,
        "num_key_value_heads x head_dim": cfg.kv_heads * cfg.head_dim,
    }
    if cfg.mla:
        named |= {"q_lora_rank": cfg.mla.q_rank, "kv_lora_rank": cfg.mla.kv_rank}
    if cfg.moe:
        named["num_experts"] = cfg.moe.experts
    sizes: dict[int, list[str]] = {}
    for key, size in named.items():
        sizes.setdefault(size, []).append(key)
    return sizes


def shortened(names: list[str]) -> str:
    """The first few names of a list that may be long."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
