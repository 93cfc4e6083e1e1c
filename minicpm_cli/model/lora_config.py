"""The only reader of adapter_config.json: what PEFT trained, held against what is merged here. No torch here.

A key that would change the result and is not understood is refused by name; what only training reads is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minicpm_cli.errors import ConfigError, UnsupportedModel
from minicpm_cli.hub.files import read_json

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
# Read below.
_READ = frozenset(
    {
        "alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules",
        "use_dora", "use_rslora",
    }
)  # fmt: skip
# Training's own, or how training began. `fan_in_fan_out` speaks of the layer's weights, which are torch.nn.Linear's
# here: A is [r, K] and B [N, r] either way, and PEFT itself turns it off for such layers.
_NEUTRAL = frozenset(
    {
        "auto_mapping", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "task_type", "unsloth_fixed",
    }
)  # fmt: skip
# Ways to begin that also change the base model, which is another one from then on.
_REBASED = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KNOWN_REFUSALS: Mapping[str, str] = MappingProxyType(
    {
        "use_qalora": "QA-LoRA (use_qalora), whose A reads groups of inputs,",
        "alora_invocation_tokens": "an adapter that begins at its invocation tokens (alora_invocation_tokens)",
        "layer_replication": "a model with layers repeated (layer_replication)",
        "lora_bias": "a bias on B (lora_bias)",
        "target_parameters": "an adapter of joined parameters (target_parameters)",
        "trainable_token_indices": "single trained tokens (trainable_token_indices)",
    }
)
WAY_OUT = "Merge it with PEFT (merge_and_unload) and give the merged folder with -m."


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """`target_modules` is a list of module names, a regular expression, or None where the file names none."""

    folder: Path
    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    ties: bool = False  # PEFT tied what it trained of the embedding and the head
    base: str | None = None

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Raises ConfigError for what cannot be read, UnsupportedModel for what is not done here."""
        file = folder / CONFIG
        if not file.is_file():
            raise ConfigError(f"{folder} holds no {CONFIG}, so it is no LoRA adapter; give PEFT's output folder")
        raw = read_json(file)
        _refuse(file, raw)
        entry = _Entry(file, raw)
        return cls(
            folder=folder,
            rank=entry.whole("r", 8),
            alpha=entry.number("lora_alpha", 8),
            rslora=entry.yes("use_rslora"),
            dora=entry.yes("use_dora"),
            rank_pattern=entry.pattern("rank_pattern", entry.whole_value),
            alpha_pattern=entry.pattern("alpha_pattern", entry.number_value),
            target_modules=entry.names("target_modules"),
            exclude_modules=entry.names("exclude_modules"),
            modules_to_save=_listed(entry.names("modules_to_save")),
            layers=entry.layers(),
            layers_pattern=_listed(entry.names("layers_pattern")),
            ties=entry.yes("ensure_weight_tying"),
            base=raw["base_model_name_or_path"] if isinstance(raw.get("base_model_name_or_path"), str) else None,
        )

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A: alpha / r (LoRA, section 4.1), or alpha / sqrt(r) (rsLoRA, section 3.2)."""
        rank, alpha = self.rank_of(module), self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def adapts(self, module: str, linear: bool) -> bool:
        """Whether PEFT put an adapter at `module`; `linear` of a block, which "all-linear" means."""
        if _named(self.exclude_modules, module) or any(_within(saved, module) for saved in self.modules_to_save):
            return False
        targets = self.target_modules
        if isinstance(targets, str):
            return linear if targets.lower() == ALL_LINEAR else bool(re.fullmatch(targets, module))
        return _named(targets, module) and self._in_layers(module)

    def saves(self, module: str) -> bool:
        return any(_within(saved, module) for saved in self.modules_to_save)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in self.layers_pattern] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        match = next((m for p in patterns if (m := re.match(p, module))), None)
        return match is not None and int(match["idx"]) in self.layers


@dataclass(frozen=True, slots=True)
class _Entry:
    """Typed look-ups in the JSON object; messages name the file."""

    file: Path
    raw: Mapping[str, Any]

    def whole(self, key: str, default: int) -> int:
        return self.whole_value(key, self.raw.get(key, default))

    def number(self, key: str, default: float) -> float:
        return self.number_value(key, self.raw.get(key, default))

    def whole_value(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, value, "a whole number above 0")
        return value

    def number_value(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, value, "a number")
        return float(value)

    def yes(self, key: str) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def pattern(self, key: str, check: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Regular expressions at the end of a module's name, and what holds there."""
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        for expression in value:
            self._compiles(key, expression)
        return {expression: check(f"{key}[{expression!r}]", each) for expression, each in value.items()}

    def names(self, key: str) -> str | tuple[str, ...] | None:
        """A regular expression, a list of names, or None."""
        value = self.raw.get(key)
        if value is None or value == []:
            return None
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string or a list of strings")
        if value.lower() != ALL_LINEAR:
            self._compiles(key, value)
        return value

    def layers(self) -> tuple[int, ...] | None:
        key = "layers_to_transform"
        value = self.raw.get(key)
        given = [value] if isinstance(value, int) else value
        if given is None or given == []:
            return None
        if not isinstance(given, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
            raise self.wrong(key, value, "a layer's number or a list of them")
        return tuple(given)

    def wrong(self, key: str, value: Any, want: str) -> ConfigError:
        return ConfigError(f"{self.file}: {key} is {value!r}; it must be {want}")

    def _compiles(self, key: str, expression: str) -> None:
        try:
            re.compile(expression)
        except re.error as error:
            raise self.wrong(key, expression, f"a regular expression ({error})") from None


def _refuse(file: Path, raw: Mapping[str, Any]) -> None:
    """What would come out different here."""
    kind = str(raw.get("peft_type") or "").upper()
    if kind != "LORA":
        what = f"peft_type {raw['peft_type']!r}" if kind else "an adapter without peft_type"
        raise UnsupportedModel(f"{file}: {what} is not supported; LORA is. {WAY_OUT}")
    if raw.get("bias") not in (None, "none"):
        raise UnsupportedModel(f"{file}: trained biases (bias {raw['bias']!r}) are not supported. {WAY_OUT}")
    start = str(raw.get("init_lora_weights", "")).lower()
    if start.startswith(_REBASED):
        raise UnsupportedModel(
            f"{file}: init_lora_weights {start!r} changed the base model, too, and the adapter fits only the changed "
            "one. Save it with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT."
        )
    for key in sorted(set(raw) - _READ - _NEUTRAL - {"ensure_weight_tying"}):
        if raw[key]:
            what = _KNOWN_REFUSALS.get(key, f"{key} ({raw[key]!r:.60}), which may change the result,")
            raise UnsupportedModel(f"{file}: {what} is not supported. {WAY_OUT}")


def _named(names: str | Iterable[str] | None, module: str) -> bool:
    """Whether `module` is one of `names`, or ends in one behind a dot; a string is a regular expression."""
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _within(name: str, module: str) -> bool:
    """Whether `name` is the module, its end, or a part of its path."""
    return f".{name}." in f".{module}."


def _pattern(patterns: Iterable[str], module: str) -> str:
    """The first of PEFT's patterns that `module` ends in; "" where there is none."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), "")


def _listed(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()
