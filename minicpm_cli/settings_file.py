"""config.toml: the user's settings and profiles, read with care for what other versions wrote, and edited in place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minicpm_cli.disk import write_private
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.setting_checks import PROFILE_PATTERN
from minicpm_cli.settings_table import ENTRIES, PROFILE, known, nearest

PROFILES = "profiles"
# What other programs, or people, call a setting; read as ours, and said.
_ALSO = {
    "model_path": "model",
    "context": "ctx",
    "context_length": "ctx",
    "num_ctx": "ctx",
    "n_ctx": "ctx",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """`values` are as TOML has them, by the names of settings; `notes` are lines to say once.

    `text` is what the file holds, empty where there is none.
    """

    path: Path
    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, required: bool) -> ConfigFile:
        """Raises UsageError for a file that cannot be read, is no TOML, or holds a key that is likely a slip."""
        text = _text(path, required=required)
        raw = _parsed(text, path) if text else {}
        tables = raw.pop(PROFILES, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise UsageError(f"{_named(path)}: {PROFILES} must be tables of settings, [profiles.NAME] each")
        notes: list[str] = []
        values = dict(_settings(raw, _named(path), notes))
        return cls(path, text, values, tables, tuple(notes))

    @property
    def origin(self) -> str:
        return _named(self.path)

    @property
    def profiles(self) -> list[str]:
        return list(self.tables)

    def profile(self, name: str, origin: str, notes: list[str]) -> dict[str, Any]:
        """The settings of `[profiles.NAME]`; what `origin` chose. Raises UsageError that lists the known ones."""
        if name not in self.tables:
            near = nearest(name, self.tables)
            there = f"Known: {', '.join(self.tables)}" if self.tables else "There is none yet"
            raise UsageError(
                f"{origin}: unknown profile {name!r}."
                + (f" Did you mean {near!r}?" if near else "")
                + f" {there} in {self.path}; minicpm config set --profile {name} NAME VALUE makes one."
            )
        values = dict(_settings(self.tables[name], self.place(name), notes))
        if PROFILE in values:
            raise UsageError(f"{self.place(name)}: a profile cannot choose another one; remove {PROFILE!r}")
        return values

    def place(self, profile: str | None = None) -> str:
        """Where a value stands, for people."""
        return f"profile {profile} in {self.path}" if profile else self.origin

    def write(self, name: str, value: Any, profile: str | None = None) -> None:
        """Sets `name`; every other line stays as it is. Raises UsageError where that is beyond us, FileError."""
        if profile is not None and (profile == "none" or not PROFILE_PATTERN.fullmatch(profile)):
            raise UsageError(f"{profile!r} cannot name a profile: letters, digits, - and _, and not none")
        if name == PROFILE and profile is not None:
            raise UsageError("a profile cannot choose another one")
        if name == PROFILE and value != "none":
            self.profile(value, self.origin, [])
        from minicpm_cli import toml_edit

        self._save(toml_edit.assign(self.text, self._table(profile), name, literal(value)), name, value, profile)

    def erase(self, name: str, profile: str | None = None) -> bool:
        """Removes `name`; False where it was not set."""
        from minicpm_cli import toml_edit

        text = toml_edit.remove(self.text, self._table(profile), name)
        if text == self.text:
            return False
        self._save(text, name, None, profile)
        return True

    def _table(self, profile: str | None) -> tuple[str, ...]:
        return (PROFILES, profile) if profile else ()

    def _save(self, text: str, name: str, value: Any, profile: str | None) -> None:
        """Only what reads back as it was meant is written."""
        try:
            after = _parsed(text, self.path)
        except UsageError:
            after = None
        wanted = _parsed(self.text, self.path)
        _put(wanted, self._table(profile), name, value)
        if after != wanted:
            raise UsageError(f"{self.path} holds {name} in a way that minicpm config cannot edit; use an editor")
        try:
            write_private(self.path.resolve(), text)  # a symlink stays one
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror or error}. Check its folder.") from None


def literal(value: Any) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _put(document: dict[str, Any], table: tuple[str, ...], name: str, value: Any) -> None:
    """What a document should be after the edit; None takes the setting away."""
    for step in table:
        document = document.setdefault(step, {})
    for key in [key for key in document if key.replace("-", "_") == name]:
        del document[key]
    if value is not None:
        document[name] = _lists(value)


def _lists(value: Any) -> Any:
    """As TOML reads it."""
    return list(map(_lists, value)) if isinstance(value, list | tuple) else value


def _settings(table: Mapping[str, Any], place: str, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """The settings among a table's keys. What no version of ours knows is left out and said; a slip is refused."""
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in _ALSO and name not in ENTRIES:
            notes.append(f"{place}: {key} is called {_ALSO[name]} here, and read as that; rename it")
            yield _ALSO[name], value
        elif name not in ENTRIES and (isinstance(value, dict) or not nearest(name)):
            notes.append(f"{place}: {key} is no setting of this version and is ignored (minicpm config lists them)")
        else:
            yield known(key, place), value


def _named(path: Path) -> str:
    return f"config file {path}"


def _text(path: Path, *, required: bool) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if required:
            raise UsageError(f"config file {path} does not exist") from None
        return ""
    except UnicodeDecodeError as error:
        raise UsageError(f"config file {path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"config file {path} cannot be read: {error.strerror}") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"config file {path} is not valid TOML: {error}") from None
