"""How an answer came about: which model, which settings, which seed. With it, a session can be replayed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from minicpm_cli.llm.info import LLMInfo
from minicpm_cli.types import SamplingParams, Usage

_USAGE = tuple(f.name for f in fields(Usage))


@dataclass(frozen=True, slots=True)
class Source:
    """The model as the user named it, and what it was then; `load` holds the load options that were chosen, `adapter` a
    hash of the files of the LoRA adapter that is one of them.

    `loaded` is when, in seconds since 1970; 0 is not known. The prefix cache was empty then.
    """

    model: str
    revision: str | None = None
    scheme: str = ""
    device: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)
    loaded: int = 0
    adapter: str = ""

    @classmethod
    def of(cls, info: LLMInfo, model: str, load: Mapping[str, Any] | None = None) -> Source:
        """Of a model that was loaded just now."""
        return cls(model, info.revision, info.scheme, info.device, dict(load or {}), int(time.time()), info.adapter)


@dataclass(frozen=True, slots=True)
class Made:
    """`settings` are the values that differ from SamplingParams(); the `dropped` oldest messages were not sent.

    The first `given` characters of the answer were given to the model, which went on from there; `begun` tells how they
    were made, if not by the user. `system` is the system
    prompt that it had, "" for none, where that is not the session's own any more.
    """

    source: Source
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    finish: str | None = None
    usage: Usage | None = None
    dropped: int = 0
    given: int = 0
    system: str | None = None
    begun: Made | None = None


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """What of `params` is set, the seed apart, as JSON has it."""
    plain = SamplingParams()
    names = [f.name for f in fields(params) if f.name != "seed" and getattr(params, f.name) != getattr(plain, f.name)]
    values = {name: getattr(params, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def record(made: Made) -> dict[str, Any]:
    """The keys that an answer's line gets; those that say nothing are left out."""
    source, usage = made.source, made.usage
    keys: dict[str, Any] = {"model": source.model, "settings": dict(made.settings), "seed": made.seed}
    keys |= {} if made.system is None else {"system": made.system}
    more = {
        "revision": source.revision,
        "scheme": source.scheme,
        "device": source.device,
        "load": dict(source.load),
        "adapter": source.adapter,
        "loaded": source.loaded,
        "finish": made.finish,
        "usage": {name: getattr(usage, name) for name in _USAGE} if usage else None,
        "dropped": made.dropped,
        "given": made.given,
        "begun": record(made.begun) if made.begun else None,
    }
    return keys | {key: value for key, value in more.items() if value}


def read(record: Mapping[str, Any]) -> Made | None:
    """None where the line does not say it: it is of an older version, or was written by hand."""
    get = record.get
    model, settings, seed = get("model"), get("settings"), get("seed")
    if not isinstance(model, str) or not isinstance(settings, dict) or not isinstance(seed, int | None):
        return None
    load = get("load")
    source = Source(
        model,
        _text(get("revision")),
        _text(get("scheme")) or "",
        _text(get("device")) or "",
        load if isinstance(load, dict) else {},
        _count(get("loaded")),
        _text(get("adapter")) or "",
    )
    counts = (_count(get("dropped")), _count(get("given")))
    begun = get("begun")
    begun = read(begun) if isinstance(begun, dict) else None
    return Made(
        source, settings, seed, _text(get("finish")), _usage(get("usage")), *counts, _text(get("system")), begun
    )


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), int) for name in _USAGE):
        return None
    return Usage(**{name: value[name] for name in _USAGE})


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
