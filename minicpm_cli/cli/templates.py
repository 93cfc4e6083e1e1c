"""`minicpm templates`: the user's prompt templates, listed, shown, made and edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from minicpm_cli.chat.attach import read_text
from minicpm_cli.cli import completion
from minicpm_cli.cli.options import OUTPUT, SAMPLING, Flags, examples, takes
from minicpm_cli.cli.prompt_template import PromptTemplate
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.cli.tables import show_records
from minicpm_cli.cli.template_files import SETTINGS, TemplateFolder, parse, written
from minicpm_cli.errors import FileError, UsageError

_EXAMPLES = examples(
    "minicpm templates",
    "minicpm templates create review -s 'You review code.' 'Find mistakes in this: {{ file | file }}'",
    "minicpm run --template review file=main.py",
    "minicpm templates edit review",
    "minicpm templates show review",
)
# What an editor is opened with where nothing is there yet.
_BEGINNING = """\
# minicpm run --template {name} topic=rivers
description = ""
# system = "You are a librarian."
prompt = '''
Write {{{{ length }}}} lines about {{{{ topic }}}}.
'''
# {{{{ path | file }}}} is the file at that path, quoted with its name; {{{{ path | text }}}} its bare content;
# {{{{ input }}}} what else stands on the command line or comes from stdin, which otherwise follows the prompt.

# model = "minicpm4-0.5b"
# temperature = 0.2
# extract = true

[variables]  # the defaults; a variable without one must be given
length = "three"
"""

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The template's name.", autocompletion=completion.templates)]


def register(app: typer.Typer) -> None:
    group = typer.Typer()
    group.callback(invoke_without_command=True, epilog=_EXAMPLES)(templates)
    group.command("list")(listed)
    group.command("show")(show)
    group.command("create", epilog=examples("minicpm templates create brief -s 'Be brief.' -t 0.2"))(create)
    group.command("edit")(edit)
    group.command("remove")(remove)
    group.command("path")(path)
    app.add_typer(group, name="templates")


@takes(OUTPUT)
def templates(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    flags: Flags,
) -> None:
    """List the prompt templates that run --template takes, or change them."""
    if not context.invoked_subcommand:
        _list(context.obj, flags, as_json=as_json)


@takes(OUTPUT)
def listed(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    flags: Flags,
) -> None:
    """List the prompt templates."""
    _list(context.obj, flags, as_json=as_json)


@takes(OUTPUT)
def show(context: typer.Context, name: _Name, *, flags: Flags) -> None:
    """Print a template as its file has it."""
    invocation, folder = _begin(context, flags)
    path = folder.file(name)
    text = read_text(path)
    invocation.terminal.answer(text if text.endswith("\n") else text + "\n")
    invocation.terminal.note(f"{path}: {parse(name, path, text).usage}")


@takes(SAMPLING, OUTPUT)
def create(
    context: typer.Context,
    name: _Name,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="The prompt, with {{ variables }}.")
    ] = None,
    *,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System prompt.", metavar="TEXT")] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="As run takes it.", metavar="MODEL", autocompletion=completion.models),
    ] = None,
    prefill: Annotated[str, typer.Option(help="How the answer begins.", metavar="TEXT", show_default=False)] = "",
    description: Annotated[str, typer.Option(help="For minicpm templates.", metavar="TEXT", show_default=False)] = "",
    extract: Annotated[bool, typer.Option("-x", "--extract", help="Only the last fenced code block.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a template of that name.")] = False,
    flags: Flags,
) -> None:
    """Keep a prompt, with the settings that are given, as a template; without any, a beginning to be edited."""
    invocation, folder = _begin(context, flags)
    texts = {"description": description, "system": system, "prompt": " ".join(prompt or []), "prefill": prefill}
    settings = {key: value for key in SETTINGS if _given(value := model if key == "model" else flags.get(key))}
    text = written({key: value for key, value in texts.items() if value}, settings, extract=extract)
    template = folder.create(name, text or _BEGINNING.format(name=name), force=force)
    invocation.terminal.note(f"{template.path}: {template.usage}")


@takes(OUTPUT)
def edit(context: typer.Context, name: _Name, *, flags: Flags) -> None:
    """Open a template, or the beginning of a new one, in $VISUAL or $EDITOR."""
    from minicpm_cli.chat.editor import edited

    invocation, folder = _begin(context, flags)
    file = folder.file(name) if folder.exists(name) else None
    before = read_text(file) if file else _BEGINNING.format(name=name)
    after = edited(before)
    if after is None:
        raise UsageError("the editor ended with an error: nothing is changed")
    if file and after == before.removesuffix("\n"):
        invocation.terminal.note("nothing is changed")
        return
    _keep(invocation, folder, name, file or folder.path / f"{name}.toml", f"{after}\n")


@takes(OUTPUT)
def remove(context: typer.Context, name: _Name, *, flags: Flags) -> None:
    """Delete a template."""
    invocation, folder = _begin(context, flags)
    file = folder.file(name)
    try:
        file.unlink()
    except OSError as error:
        raise FileError(f"cannot delete {file}: {error.strerror or error}") from None
    invocation.terminal.note(f"{file} is deleted")


@takes(OUTPUT)
def path(context: typer.Context, *, flags: Flags) -> None:
    """Print the folder of the templates, whether or not there is one."""
    context.obj.terminal.out.write(f"{TemplateFolder.of_user().path}\n")


def _begin(context: typer.Context, flags: Flags) -> tuple[Invocation, TemplateFolder]:
    invocation: Invocation = context.obj
    invocation.configure({parameter.name: flags[parameter.name] for parameter in OUTPUT})
    return invocation, TemplateFolder.of_user()


def _given(value: Any) -> bool:
    return value is not None and value != [] and value != ()


def _keep(invocation: Invocation, folder: TemplateFolder, name: str, path: Path, text: str) -> None:
    """Written also where it is wrong, so that nothing typed is lost; then what is wrong is the error."""
    folder.write(path, text)
    try:
        template = parse(name, path, text)
    except UsageError as error:
        raise UsageError(f"{error} (it is kept; minicpm templates edit {name} mends it)") from None
    invocation.terminal.note(f"{path}: {template.usage}")


def _list(invocation: Invocation, flags: Flags, *, as_json: bool) -> None:
    invocation.configure(flags)
    folder, terminal = TemplateFolder.of_user(), invocation.terminal
    found: list[PromptTemplate] = []
    for name in folder.names():
        try:
            found.append(folder.find(name))
        except (UsageError, FileError) as error:
            terminal.line(f"minicpm: {error}")
    records = [_record(template) for template in found]
    rows = [(t.name, " ".join(_variables(t)) or "-", t.description or "-") for t in found]
    show_records(terminal, records, ("template", "variables", "description"), rows, as_json=as_json)
    if not found and not as_json:
        terminal.note(f"there are no templates in {folder.path}; minicpm templates create NAME makes one")


def _variables(template: PromptTemplate) -> list[str]:
    return [f"{name}={template.defaults[name]}" if name in template.defaults else name for name in template.variables]


def _record(template: PromptTemplate) -> dict[str, Any]:
    return {
        "name": template.name,
        "path": str(template.path),
        "description": template.description,
        "variables": {name: template.defaults.get(name) for name in template.variables},
        "input": template.takes_input,
        "settings": dict(template.settings),
        "extract": template.extract,
    }
