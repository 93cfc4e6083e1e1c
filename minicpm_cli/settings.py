"""What the user has set, and where: defaults < config.toml < a profile in it < MINICPM_* < a prompt template < flags.

The only module that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from minicpm_cli.disk import path_of
from minicpm_cli.settings_file import ConfigFile
from minicpm_cli.settings_table import APP, DEFAULT_MODEL, ENTRIES, OWN, PROFILE, LoadOptions, known, nearest
from minicpm_cli.types import SamplingParams

__all__ = ["APP", "DEFAULT", "DEFAULT_MODEL", "Layer", "LoadOptions", "Row", "Settings", "calm_waiting", "config_path"]

PREFIX = "MINICPM_"
# GNU OpenMP's turns of waiting before a thread sleeps. Its own default spins for milliseconds, so that a busy neighbour
# stops everything: the demo on 2 cores falls from 143 to between 4 and 43 tokens/s beside one busy process. With 1000
# it keeps 52 of 139; with 300, 69 of 88.
SPIN_COUNT = "1000"
DEFAULT = "default"

Given = Iterator[tuple[str, Any, str]]  # name, value, origin


@dataclass(frozen=True, slots=True)
class Row:
    """A line of `minicpm config`: `origin` is 'default', 'config file PATH', 'MINICPM_X' or 'flag --x'."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings of another source, as they were written there: stronger than variables, weaker than flags."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, checked. `sampling` holds only what was set; the rest is the checkpoint's own choice.

    `cache_dir` keeps what can be fetched again, `data_dir` the user's sessions and history; beside the config file
    are the user's prompt templates. `notes` are lines to say once, `profiles` the names of those that could be chosen.
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
    profiles: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config_path: Path | None = None,
        layers: Sequence[Layer] = (),
    ) -> Settings:
        """Read all sources; of `layers`, later ones are stronger. A flag that is None was not given.

        Raises UsageError naming origin, value and range.
        """
        environ = os.environ if environ is None else environ
        file = ConfigFile.read(*_config_path(environ, config_path))
        rows = {entry.name: Row(entry.name, entry.default(), DEFAULT) for entry in ENTRIES.values()}
        notes = [*file.notes]
        for name, value, origin in _given(flags or {}, environ, file, layers, notes):
            rows[name] = Row(name, ENTRIES[name].checked(value, origin), origin)
        return _build(rows, file, (*notes, *_unknown_variables(environ)))

    def origin(self, name: str) -> str:
        """Where the value of `name` comes from."""
        return next(row.origin for row in self.rows if row.name == name)

    @property
    def model_is_default(self) -> bool:
        """Nobody chose a model: the demo runs, and the user is told so."""
        return self.origin("model") == DEFAULT


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """The config file, whether or not it exists."""
    return _config_path(os.environ if environ is None else environ, None)[0]


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it stands; an empty one hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def variables() -> MutableMapping[str, str]:
    """All of them, for what changes how a library reads its own."""
    return os.environ


def editor() -> str | None:
    """The command line of the user's editor."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or None


def calm_waiting(environ: MutableMapping[str, str] | None = None) -> None:
    """Lets waiting threads sleep soon, unless the user says how they wait. Works only before torch is loaded."""
    environ = os.environ if environ is None else environ
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def _build(rows: Mapping[str, Row], file: ConfigFile, notes: tuple[str, ...]) -> Settings:
    values = {name: row.value for name, row in rows.items()}
    sampling = {f.name: values[f.name] for f in fields(SamplingParams) if values[f.name] is not None}
    return Settings(
        options=LoadOptions(**{f.name: values[f.name] for f in fields(LoadOptions)}),
        sampling=MappingProxyType(sampling),
        config_path=file.path,
        rows=tuple(rows.values()),
        notes=notes,
        profiles=tuple(file.profiles),
        **{name: values[name] for name in OWN},
    )


def _given(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: ConfigFile, layers: Sequence[Layer], notes: list[str]
) -> Given:
    """(name, value, origin) from the weakest source to the strongest."""
    for name, value in file.values.items():
        yield name, value, file.origin
    yield from _profile(flags, environ, file, notes)
    yield from _conventions(environ)
    for name in ENTRIES:
        variable = PREFIX + name.upper()
        if environ.get(variable):
            yield name, environ[variable], variable
    for layer in layers:
        for key, value in layer.values.items():
            yield known(key, layer.origin), value, layer.origin
    for key, value in flags.items():
        if value is not None and value != () and value != []:
            yield known(key, "flags"), value, f"flag {_flag(key, value)}"


def _profile(flags: Mapping[str, Any], environ: Mapping[str, str], file: ConfigFile, notes: list[str]) -> Given:
    """The settings of the profile that the strongest source chose."""
    sources = (
        (flags.get(PROFILE), f"flag --{PROFILE}"),
        (environ.get(PREFIX + PROFILE.upper()), PREFIX + PROFILE.upper()),
        (file.values.get(PROFILE), file.origin),
    )
    chosen, origin = next((source for source in sources if source[0]), (None, DEFAULT))
    profile = None if chosen is None else ENTRIES[PROFILE].checked(chosen, origin)
    for name, value in file.profile(profile, origin, notes).items() if profile else ():
        yield name, value, file.place(profile)


def _conventions(environ: Mapping[str, str]) -> Given:
    """What terminals agree on."""
    if environ.get("NO_COLOR"):
        yield "color", False, "NO_COLOR"
    if environ.get("TERM") == "dumb":
        yield "plain", True, "TERM=dumb"


def _flag(name: str, value: Any) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _config_path(environ: Mapping[str, str], given: Path | None) -> tuple[Path, bool]:
    """The config file, and whether the user named it (then it must exist)."""
    if given is not None:
        return path_of(given), True
    if environ.get(PREFIX + "CONFIG"):
        return path_of(environ[PREFIX + "CONFIG"]), True
    return Path(platformdirs.user_config_dir(APP)) / "config.toml", False


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A note for each MINICPM_* that looks like a slip of the pen; others may belong to other programs."""
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in ENTRIES or name == "config":
            continue
        if near := nearest(name):
            yield f"{variable} is not a setting and is ignored; did you mean {PREFIX}{near.upper()}?"
