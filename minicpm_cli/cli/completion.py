"""What a shell offers after an option or a command: words of the settings' table, and names that the user gave.

Where nothing fits, the shell offers files. Nothing is said here: a broken config file must not spoil a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import typer

from minicpm_cli.errors import MinicpmError
from minicpm_cli.settings import config_path
from minicpm_cli.settings_file import ConfigFile
from minicpm_cli.settings_table import ENTRIES, PROFILE

Offer = tuple[str, str]  # a word, and what it stands for
Complete = Callable[[str], list[Offer]]  # of what was typed so far


def for_setting(name: str) -> Complete | None:
    """What `name` can be set to; None where words cannot tell."""
    if name == "model":
        return models
    if name == PROFILE:
        return profiles
    choices = ENTRIES[name].choices if name in ENTRIES else ()
    return _words(choices) if choices else None


def _words(choices: Iterable[str]) -> Complete:
    def complete(incomplete: str) -> list[Offer]:
        return _fitting([(choice, "") for choice in choices], incomplete)

    return complete


def models(incomplete: str) -> list[Offer]:
    """Aliases, each with the repository that it stands for."""
    from minicpm_cli.hub.catalog import CATALOG

    return _fitting([(entry.alias, entry.repo or entry.note) for entry in CATALOG], incomplete)


def profiles(incomplete: str) -> list[Offer]:
    return _fitting([(name, "") for name in _profiles()], incomplete)


def settings(incomplete: str) -> list[Offer]:
    return _fitting([(name, "") for name in ENTRIES], incomplete)


def values(context: typer.Context, incomplete: str) -> list[Offer]:
    """For an argument that comes after NAME."""
    offered = for_setting(str(context.params.get("name") or "").replace("-", "_"))
    return offered(incomplete) if offered else []


def set_settings(incomplete: str) -> list[Offer]:
    """Those that the config file holds."""
    with suppress(MinicpmError):
        file = ConfigFile.read(config_path(), required=False)
        tables: Iterable[Any] = (file.values, *file.tables.values())
        return _fitting([(name, "") for name in dict.fromkeys(key for table in tables for key in table)], incomplete)
    return []


def _profiles() -> Iterator[str]:
    with suppress(MinicpmError):
        yield from ConfigFile.read(config_path(), required=False).profiles


def _fitting(offers: Iterable[Offer], incomplete: str) -> list[Offer]:
    return [offer for offer in offers if offer[0].startswith(incomplete)]
