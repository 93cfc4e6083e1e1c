"""Every setting there is: its name, its default, and what it may be. Flags, variables, profiles and files share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from minicpm_cli import setting_checks as checks
from minicpm_cli.errors import RequestError, UsageError
from minicpm_cli.types import SamplingParams

APP = "minicpm-cli"
DEFAULT_MODEL = "demo"
PROFILE = "profile"
SECRET = ("api_key",)  # not for screens that others see
OWN = ("threads", "cache_dir", "data_dir", "color", "plain", "quiet", "verbose")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded. None leaves the choice to the memory plan, or means "do not".

    `ctx` tokens, `max_seqs` sequences at once, `max_batch_tokens` tokens a step;
    `memory_fraction` of the memory that is free. Up to `lookup` tokens that repeat what was said are verified in a
    step; None: where that is known to pay.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    ctx: int | None = None
    max_seqs: int | None = None
    memory_fraction: float = 0.9
    quantize: str | None = None
    head_bits: int = 16
    gptq_format: str | None = None
    kv_dtype: str = "auto"
    graphs: bool = True
    chat_template: str = "auto"
    lora: str | None = None
    max_batch_tokens: int | None = None
    lookup: int | None = 0
    server: str | None = None  # asked instead, where commands can do without weights of their own
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """`choices` are the words that a shell can complete; what else is allowed only `check` knows."""

    name: str
    check: Callable[[Any], Any]  # returns the value; ValueError says what it must be
    default: Callable[[], Any] = field(default=lambda: None)
    choices: tuple[str, ...] = ()

    def checked(self, value: Any, origin: str) -> Any:
        """Raises UsageError that names `origin`, the value and what it must be."""
        try:
            return self.check(value)
        except RequestError as error:  # check_sampling has said it all but the place
            raise UsageError(f"{origin}: {error}") from None
        except ValueError as error:
            raise UsageError(f"{origin}: {self.name} is {value!r}; it must be {error}") from None


def known(key: str, where: str) -> str:
    """The name of the setting that `key` spells. Raises UsageError with the nearest one."""
    name = key.replace("-", "_")
    if name in ENTRIES:
        return name
    near = nearest(name)
    raise UsageError(
        f"{where}: unknown setting {key!r}."
        + (f" Did you mean {near!r}?" if near else f" Known: {', '.join(ENTRIES)}.")
    )


def nearest(name: str, names: Iterable[str] | None = None) -> str | None:
    """The one of `names`, by default the settings, that was perhaps meant."""
    import difflib

    return next(iter(difflib.get_close_matches(name, ENTRIES if names is None else names, 1)), None)


_DTYPES = "auto", "bf16", "fp16", "fp32"
_TORCH = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"})


def _choice(name: str, *choices: str, none: str | None = None) -> Entry:
    words = (*choices, none) if none else choices
    return _load(name, checks.one_of(*choices, none=none), words)


def _load(name: str, check: Callable[[Any], Any], choices: tuple[str, ...] = ()) -> Entry:
    return Entry(name, check, lambda: getattr(LoadOptions(), name), choices)


def _entries() -> Iterator[Entry]:
    whole, switch = checks.whole(1), ("true", "false")
    yield _load("model", checks.text)
    yield _load("device", checks.device, ("auto", "cpu", "cuda"))
    yield _load("dtype", checks.called(checks.one_of(*_DTYPES), _TORCH), _DTYPES)
    yield _load("ctx", whole)
    yield _load("max_seqs", whole)
    yield _load("memory_fraction", checks.fraction)
    yield _choice("quantize", "w4", "w8", "nf4", "int8", "fp8", none="none")
    yield _load("head_bits", checks.head_bits, ("4", "8", "16"))
    yield _choice("gptq_format", "v1", "v2", none="auto")
    yield _choice("kv_dtype", "auto", "fp8", "int8")
    yield _load("graphs", checks.switch, switch)
    yield _load("chat_template", checks.template, checks.TEMPLATES)
    yield _load("lora", checks.adapter)
    yield _load("max_batch_tokens", whole)
    yield _load("lookup", checks.whole(0, 32))
    yield _load("server", checks.server)
    yield _load("api_key", checks.text)
    for parameter in fields(SamplingParams):
        yield Entry(
            parameter.name, checks.sampling(parameter.name), choices=switch if parameter.name == "think" else ()
        )
    yield Entry("threads", checks.whole(1, 4096))
    yield Entry("cache_dir", checks.path, lambda: Path(platformdirs.user_cache_dir(APP)))
    yield Entry("data_dir", checks.path, lambda: Path(platformdirs.user_data_dir(APP)))
    yield Entry("color", checks.switch, lambda: True, switch)
    for name in ("plain", "quiet", "verbose"):
        yield Entry(name, checks.switch, lambda: False, switch)
    yield Entry(PROFILE, checks.profile)


ENTRIES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _entries()})
