"""`minicpm config`: every setting and where it comes from; the config file, changed a line at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.options import OUTPUT, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.cli.tables import show_records
from minicpm_cli.disk import path_of
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import DEFAULT, Row, Settings, config_path
from minicpm_cli.settings_file import ConfigFile
from minicpm_cli.settings_table import ENTRIES, SECRET, known

_EXAMPLES = examples(
    "minicpm config",
    "minicpm config --json | jq .model",
    "minicpm config set model minicpm4-0.5b",
    "minicpm config set --profile fast max_tokens 200",
    "minicpm config get data_dir",
    '$EDITOR "$(minicpm config path)"',
)
_MANY = ("stop", "logit_bias")  # settings that are lists
_FILES = ("chat_template", "lora", "cache_dir", "data_dir", "model")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A setting.", autocompletion=completion.settings)]


def register(app: typer.Typer) -> None:
    group = typer.Typer()
    group.callback(invoke_without_command=True, epilog=_EXAMPLES)(config)
    number = {"ignore_unknown_options": True}  # a value may be -1
    lines = {
        "set": "minicpm config set temperature 0.3",
        "get": "minicpm config get model",
        "unset": "minicpm config unset temperature",
    }
    group.command("get", epilog=examples(lines["get"]))(get)
    group.command("set", epilog=examples(lines["set"]), context_settings=number)(assign)
    group.command("unset", epilog=examples(lines["unset"]))(unset)
    group.command("path")(path)
    app.add_typer(group, name="config")


@takes(OUTPUT)
def config(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    flags: Flags,
) -> None:
    """Show each setting and where it comes from, or change the config file.

    Defaults < config file < profile < MINICPM_* variables < prompt template < flags.
    """
    invocation: Invocation = context.obj
    if context.invoked_subcommand:
        context.meta[__name__] = flags
        return
    settings = invocation.configure(flags)
    terminal = invocation.terminal
    shown = list(map(_covered, settings.rows))
    values = {row.name: {"value": _plain(row.value), "origin": row.origin} for row in shown}
    rows = [(row.name, _text(row.value), row.origin) for row in shown]
    show_records(terminal, values, ("setting", "value", "origin"), rows, as_json=as_json)
    if not as_json:
        terminal.note(f"the config file is {settings.config_path}" + _absent(settings.config_path.exists()))
    if settings.profiles and not as_json:
        terminal.note(f"profiles: {', '.join(settings.profiles)}")


@takes(OUTPUT)
def path(context: typer.Context, *, flags: Flags) -> None:
    """Print the path of the config file, whether or not there is one."""
    context.obj.terminal.out.write(f"{config_path()}\n")


@takes(OUTPUT)
def get(
    context: typer.Context,
    name: _Name,
    *,
    reveal: Annotated[bool, typer.Option("--reveal", help="A key as it is, not as ***.")] = False,
    flags: Flags,
) -> None:
    """Print the value of one setting; an empty line where it is not set."""
    invocation: Invocation = context.obj
    settings = invocation.configure(_merged(context, flags))
    row = _row(settings, known(name, "minicpm config get"))
    value = _plain((row if reveal else _covered(row)).value)
    invocation.terminal.out.write(("" if value is None else value if isinstance(value, str) else _text(value)) + "\n")


@takes(OUTPUT)
def assign(
    context: typer.Context,
    name: _Name,
    value: Annotated[
        list[str],
        typer.Argument(
            metavar="VALUE...", help=f"Several only for {' and '.join(_MANY)}.", autocompletion=completion.values
        ),
    ],
    *,
    flags: Flags,
) -> None:
    """Set one setting in the config file, or with --profile in a profile. It is checked as a flag is."""
    invocation, profile = _begin(context, flags)
    setting = known(name, "minicpm config set")
    if len(value) > 1 and setting not in _MANY:
        raise UsageError(f"minicpm config set: {setting} takes one value, not {len(value)}; quote what has spaces")
    file = ConfigFile.read(config_path(), required=False)
    file.write(setting, _value(setting, value), profile)
    _say(invocation, file, setting, profile)


@takes(OUTPUT)
def unset(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A setting.", autocompletion=completion.set_settings)],
    *,
    flags: Flags,
) -> None:
    """Remove one setting from the config file, or with --profile from a profile."""
    invocation, profile = _begin(context, flags)
    file = ConfigFile.read(config_path(), required=False)
    setting = name.replace("-", "_")  # also one that this version does not know
    if not file.erase(setting, profile):
        raise UsageError(f"minicpm config unset: {name} is not set in {file.place(profile)}")
    if setting in ENTRIES:
        _say(invocation, file, setting, profile)


def _merged(context: typer.Context, flags: Flags) -> Flags:
    """Flags may stand before the subcommand, too."""
    before: Flags = context.meta.get(__name__, {})
    return {name: before.get(name) if value is None else value for name, value in flags.items()}


def _begin(context: typer.Context, flags: Flags) -> tuple[Invocation, str | None]:
    """The profile to change. The settings are not read yet: what is wrong in the file may be what is to be mended."""
    merged = _merged(context, flags)
    invocation: Invocation = context.obj
    invocation.terminal = replace(invocation.terminal, quiet=bool(merged["quiet"]), verbose=bool(merged["verbose"]))
    return invocation, merged["profile"]


def _value(name: str, given: list[str]) -> Any:
    """What goes into the file. Paths are made absolute: the file is read from anywhere."""
    words: Any = given if len(given) > 1 else given[0]
    checked = ENTRIES[name].checked(words, "minicpm config set")
    if checked is None:
        return words  # auto or none, which is a choice, too
    if name in _FILES and (there := path_of(words)).exists() and (name != "model" or "/" in words):
        return str(there.resolve())
    return str(checked) if isinstance(checked, Path) else checked


def _say(invocation: Invocation, file: ConfigFile, name: str, profile: str | None) -> None:
    """What is so now, which a stronger source may decide."""
    terminal = invocation.terminal
    try:
        settings = Settings.load({"profile": profile})
    except UsageError as error:
        terminal.note(f"the change is made; what is still wrong: {error}")
        return
    row, place = _row(settings, name), file.place(profile)
    state = "not set" if row.value is None else _text(_covered(row).value)
    if row.origin in (place, DEFAULT):
        terminal.note(f"{name} is {state} now ({row.origin})")
    else:
        terminal.note(f"{place} is changed, but {row.origin} is stronger: {name} is {state}")


def _row(settings: Settings, name: str) -> Row:
    return next(row for row in settings.rows if row.name == name)


def _covered(row: Row) -> Row:
    """With stars for what is not for screens that others see."""
    return replace(row, value="***") if row.name in SECRET and row.value else row


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | tuple | None) else str(value)


def _text(value: Any) -> str:
    return "-" if value is None else json.dumps(_plain(value), ensure_ascii=False)


def _absent(there: bool) -> str:
    return "" if there else ", which does not exist yet"
