"""What the user has set, and where: defaults < config.toml < MINICPM_* < flags.

The only module that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from minicpm_cli import setting_checks as checks
from minicpm_cli.errors import RequestError, UsageError
from minicpm_cli.types import SamplingParams

APP = "minicpm-cli"
PREFIX = "MINICPM_"
# GNU OpenMP's turns of waiting before a thread sleeps. Its own default spins for milliseconds, so that a busy neighbour
# stops everything: the demo on 2 cores falls from 143 to between 4 and 43 tokens/s beside one busy process. With 1000
# it keeps 52 of 139; with 300, 69 of 88.
SPIN_COUNT = "1000"
DEFAULT = "default"
DEFAULT_MODEL = "demo"


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


@dataclass(frozen=True, slots=True)
class Row:
    """A line of `minicpm config`: `origin` is 'default', 'config file PATH', 'MINICPM_X' or 'flag --x'."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, checked. `sampling` holds only what was set; the rest is the checkpoint's own choice.

    `cache_dir` keeps what can be fetched again, `data_dir` the user's sessions and history.
    `notes` are lines to say once.
    """

    options: LoadOptions
    sampling: Mapping[str, Any]
    cache_dir: Path
    data_dir: Path
    config_path: Path
    threads: int | None = None
    color: bool = True
    plain: bool = False
    quiet: bool = False
    verbose: bool = False
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config_path: Path | None = None,
    ) -> Settings:
        """Read all four sources. A flag that is None was not given.

        Raises UsageError naming origin, value and range.
        """
        environ = os.environ if environ is None else environ
        path, named = _config_path(environ, config_path)
        rows = {entry.name: Row(entry.name, entry.default(), DEFAULT) for entry in _ENTRIES.values()}
        for name, value, origin in _given(flags or {}, environ, path, named):
            rows[name] = Row(name, _checked(name, value, origin), origin)
        return _build(rows, path, tuple(_unknown_variables(environ)))

    def origin(self, name: str) -> str:
        """Where the value of `name` comes from."""
        return next(row.origin for row in self.rows if row.name == name)

    @property
    def model_is_default(self) -> bool:
        """Nobody chose a model: the demo runs, and the user is told so."""
        return self.origin("model") == DEFAULT


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it stands; an empty one hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def calm_waiting(environ: MutableMapping[str, str] | None = None) -> None:
    """Lets waiting threads sleep soon, unless the user says how they wait. Works only before torch is loaded."""
    environ = os.environ if environ is None else environ
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    check: Callable[[Any], Any]  # returns the value; ValueError says what it must be
    default: Callable[[], Any] = field(default=lambda: None)


def _build(rows: Mapping[str, Row], path: Path, notes: tuple[str, ...]) -> Settings:
    values = {name: row.value for name, row in rows.items()}
    sampling = {f.name: values[f.name] for f in fields(SamplingParams) if values[f.name] is not None}
    return Settings(
        options=LoadOptions(**{f.name: values[f.name] for f in fields(LoadOptions)}),
        sampling=MappingProxyType(sampling),
        config_path=path,
        rows=tuple(rows.values()),
        notes=notes,
        **{name: values[name] for name in _OWN},
    )


def _given(
    flags: Mapping[str, Any], environ: Mapping[str, str], path: Path, named: bool
) -> Iterator[tuple[str, Any, str]]:
    """(name, value, origin) from the weakest source to the strongest."""
    for key, value in _read_config(path, named).items():
        yield _known(key, f"config file {path}"), value, f"config file {path}"
    if environ.get("NO_COLOR"):
        yield "color", False, "NO_COLOR"
    if environ.get("TERM") == "dumb":
        yield "plain", True, "TERM=dumb"
    for name in _ENTRIES:
        variable = PREFIX + name.upper()
        if environ.get(variable):
            yield name, environ[variable], variable
    for key, value in flags.items():
        if value is not None and value != () and value != []:
            yield _known(key, "flags"), value, f"flag {_flag(key, value)}"


def _flag(name: str, value: Any) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _known(key: str, where: str) -> str:
    name = key.replace("-", "_")
    if name in _ENTRIES:
        return name
    near = _near(name)
    raise UsageError(
        f"{where}: unknown setting {key!r}." + (f" Did you mean {near!r}?" if near else f" Known: {_names()}.")
    )


def _near(name: str) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, _ENTRIES, 1)), None)


def _names() -> str:
    return ", ".join(_ENTRIES)


def _checked(name: str, value: Any, origin: str) -> Any:
    try:
        return _ENTRIES[name].check(value)
    except RequestError as error:  # check_sampling has said it all but the place
        raise UsageError(f"{origin}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{origin}: {name} is {value!r}; it must be {error}") from None


def _config_path(environ: Mapping[str, str], given: Path | None) -> tuple[Path, bool]:
    """The config file, and whether the user named it (then it must exist)."""
    if given is not None:
        return Path(given).expanduser(), True
    if environ.get(PREFIX + "CONFIG"):
        return Path(environ[PREFIX + "CONFIG"]).expanduser(), True
    return Path(platformdirs.user_config_dir(APP)) / "config.toml", False


def _read_config(path: Path, named: bool) -> dict[str, Any]:
    if not named and not path.exists():
        return {}
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"config file {path} cannot be read: {error.strerror}") from None


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A note for each MINICPM_* that looks like a slip of the pen; others may belong to other programs."""
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in _ENTRIES or name == "config":
            continue
        if near := _near(name):
            yield f"{variable} is not a setting and is ignored; did you mean {PREFIX}{near.upper()}?"


def _entries() -> Iterator[_Entry]:
    whole, base = checks.whole(1), LoadOptions()
    load: dict[str, Callable[[Any], Any]] = {
        "model": checks.text,
        "device": checks.device,
        "dtype": checks.one_of("auto", "bf16", "fp16", "fp32"),
        "ctx": whole,
        "max_seqs": whole,
        "memory_fraction": checks.fraction,
        "quantize": checks.one_of("w4", "w8", "nf4", "int8", "fp8", none="none"),
        "head_bits": checks.head_bits,
        "gptq_format": checks.one_of("v1", "v2", none="auto"),
        "kv_dtype": checks.one_of("auto", "fp8", "int8"),
        "graphs": checks.switch,
        "chat_template": checks.template,
        "lora": checks.directory,
        "max_batch_tokens": whole,
        "lookup": checks.whole(0, 32),
    }
    for name, check in load.items():
        yield _Entry(name, check, lambda name=name: getattr(base, name))  # type: ignore[misc]
    for parameter in fields(SamplingParams):
        yield _Entry(parameter.name, checks.sampling(parameter.name))
    yield _Entry("threads", checks.whole(1, 4096))
    yield _Entry("cache_dir", checks.path, lambda: Path(platformdirs.user_cache_dir(APP)))
    yield _Entry("data_dir", checks.path, lambda: Path(platformdirs.user_data_dir(APP)))
    yield _Entry("color", checks.switch, lambda: True)
    for name in ("plain", "quiet", "verbose"):
        yield _Entry(name, checks.switch, lambda: False)


def _table(entries: Iterable[_Entry]) -> Mapping[str, _Entry]:
    return MappingProxyType({entry.name: entry for entry in entries})


_ENTRIES = _table(_entries())
_OWN = ("threads", "cache_dir", "data_dir", "color", "plain", "quiet", "verbose")
