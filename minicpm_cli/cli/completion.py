"""What a shell offers after an option or a command: words of the settings' table, and names that the user gave.

Where nothing fits, the shell offers files. Nothing is said here: a broken config file must not spoil a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer

from minicpm_cli.errors import FileError, MinicpmError, UsageError
from minicpm_cli.settings import Settings, config_path
from minicpm_cli.settings_file import ConfigFile
from minicpm_cli.settings_table import ENTRIES, PROFILE

Offer = tuple[str, str]  # a word, and what it stands for
Complete = Callable[[str], list[Offer]]  # of what was typed so far
INSTALL, SHOW = "--install-completion", "--show-completion"
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def install(shell: str | None) -> str:
    """Makes `shell`, else the one that this program was started from, complete; returns what to tell the user."""
    shell = _shell(INSTALL, shell)
    try:
        name, path = _typer().install(shell=shell, prog_name="minicpm")
    except OSError as error:
        raise FileError(
            f"the completion for {shell} cannot be installed: {error.filename}: {error.strerror}. "
            f"minicpm {SHOW} {shell} prints it, to be kept where you like"
        ) from None
    return f"{name} completes minicpm from {path}, once it is started anew"


def script(shell: str | None) -> str:
    """What `install` writes."""
    shell = _shell(SHOW, shell)
    return str(_typer().get_completion_script(prog_name="minicpm", complete_var="_MINICPM_COMPLETE", shell=shell))


def _typer() -> Any:
    """Its scripts and where they go; the module has them from elsewhere, which differs between versions."""
    return import_module("typer.completion")


def _shell(option: str, named: str | None) -> str:
    import shellingham

    if named is None:
        with suppress(shellingham.ShellDetectionFailure):
            named = shellingham.detect_shell()[0]
    if named not in _SHELLS:
        what = "this program was not started from a shell" if named is None else f"there is no completion for {named}"
        raise UsageError(f"{what}; name one: minicpm {option} {'|'.join(_SHELLS[:3])}")
    return named


def for_setting(name: str) -> Complete | None:
    """What `name` can be set to; None where words cannot tell."""
    if name == "model":
        return models
    if name == PROFILE:
        return profiles
    choices = ENTRIES[name].choices if name in ENTRIES else ()
    return words(*choices) if choices else None


def words(*choices: str) -> Complete:
    def complete(incomplete: str) -> list[Offer]:
        return _fitting([(choice, "") for choice in choices], incomplete)

    return complete


def models(incomplete: str) -> list[Offer]:
    """Aliases, each with the repository that it stands for."""
    from minicpm_cli.hub.catalog import CATALOG

    return _fitting([(entry.alias, entry.repo or entry.note) for entry in CATALOG], incomplete)


def workloads(incomplete: str) -> list[Offer]:
    from minicpm_cli.bench.command import CHOICES

    return words(*CHOICES)(incomplete)


def shapes(incomplete: str) -> list[Offer]:
    from minicpm_cli.bench.shapes import SHAPES

    return words(*SHAPES)(incomplete)


def methods(incomplete: str) -> list[Offer]:
    from minicpm_cli.quantize.recipe import METHODS

    return words(*METHODS)(incomplete)


def profiles(incomplete: str) -> list[Offer]:
    return _fitting([(name, "") for name in _profiles()], incomplete)


def templates(incomplete: str) -> list[Offer]:
    from minicpm_cli.cli.template_files import TemplateFolder

    return _fitting([(name, "") for name in TemplateFolder.of_user().names()], incomplete)


def variables(context: typer.Context, incomplete: str) -> list[Offer]:
    """Of the template that was named before."""
    from minicpm_cli.cli.template_files import TemplateFolder

    with suppress(MinicpmError):
        if name := context.params.get("template"):
            names = TemplateFolder.of_user().find(str(name)).variables
            return _fitting([(f"{name}=", "") for name in names], incomplete)
    return []


def sessions(incomplete: str) -> list[Offer]:
    """The newest first, each with how it begins."""
    from minicpm_cli.chat.sessions import Sessions

    with suppress(MinicpmError, OSError):
        found = Sessions(Settings.load().data_dir / "sessions").summaries()
        return _fitting([(summary.name, summary.told()) for summary in found], incomplete)
    return []


def encodings(incomplete: str) -> list[Offer]:
    from minicpm_cli.cli.reading import ENCODINGS

    return _fitting([(name, "") for name in ENCODINGS], incomplete)


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
