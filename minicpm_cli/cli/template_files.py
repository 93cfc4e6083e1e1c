"""The files of prompt templates: TOML, or Markdown with settings above the text, in a folder beside config.toml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minicpm_cli.chat.attach import read_text, without_final_newline
from minicpm_cli.cli.prompt_template import PromptTemplate
from minicpm_cli.disk import path_of, write_private
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.settings import config_path
from minicpm_cli.settings_file import literal
from minicpm_cli.settings_table import ENTRIES, nearest
from minicpm_cli.types import SamplingParams

SETTINGS = ("model", *(f.name for f in fields(SamplingParams)))
SUFFIXES = (".toml", ".md")
_TEXTS = ("description", "system", "prompt", "prefill")
_BLOCKS = ("system", "prompt")  # their final newline means nothing
_NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True, slots=True)
class TemplateFolder:
    """The user's templates by name; a template is read from its file whenever it is asked for."""

    path: Path

    @classmethod
    def of_user(cls) -> TemplateFolder:
        return cls(config_path().parent / "templates")

    def names(self) -> list[str]:
        return sorted({path.stem for path in self._files()})

    def find(self, name: str) -> PromptTemplate:
        """The template of that name, or in the file of that path. Raises UsageError that lists the known ones."""
        path = path_of(name)
        if path.suffix in SUFFIXES and ("/" in name or path.is_file()):
            return parse(path.stem, path, read_text(path))
        path = self.file(name)
        return parse(name, path, read_text(path))

    def exists(self, name: str) -> bool:
        return bool(self._paths(name))

    def file(self, name: str) -> Path:
        """The file of a template that exists."""
        found = self._paths(name)
        if len(found) > 1:
            raise UsageError(f"there are two templates {name!r}: {found[0]} and {found[1]}; remove one of them")
        if not found:
            raise UsageError(self._unknown(name))
        return found[0]

    def create(self, name: str, text: str, *, force: bool) -> PromptTemplate:
        """Keeps `text`, which is TOML, as a new template. Raises UsageError for one that is there, or cannot work."""
        there = self._paths(name)
        if there and not force:
            raise UsageError(f"there is a template {name!r} already: {there[0]}; --force replaces it")
        path = self.path / f"{name}.toml"
        template = parse(name, path, text)
        self.write(path, text)
        for other in there:
            if other != path:
                other.unlink(missing_ok=True)
        return template

    def write(self, path: Path, text: str) -> None:
        try:
            write_private(path.resolve(), text)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror or error}. Check its folder.") from None

    def _paths(self, name: str) -> list[Path]:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a template: use letters, digits, '.', '-' and '_', at most 100")
        return [path for suffix in SUFFIXES if (path := self.path / f"{name}{suffix}").is_file()]

    def _files(self) -> Iterator[Path]:
        if self.path.is_dir():
            found = (path for path in self.path.iterdir() if path.suffix in SUFFIXES and _NAME.fullmatch(path.stem))
            yield from (path for path in found if path.is_file())

    def _unknown(self, name: str) -> str:
        names = self.names()
        near = nearest(name, names)
        return (
            f"there is no template {name!r} in {self.path}."
            + (f" Did you mean {near!r}?" if near else "")
            + (f" Known: {', '.join(names)}." if names else "")
            + f" minicpm templates create {name} makes one."
        )


def written(texts: Mapping[str, str], settings: Mapping[str, Any], *, extract: bool) -> str:
    """The TOML file of a template; texts of several lines stay readable."""
    lines = [f"{key} = {_block(value) if key in _BLOCKS else literal(value)}" for key, value in texts.items() if value]
    lines += ["extract = true"] if extract else []
    lines += [f"{name} = {literal(value)}" for name, value in settings.items()]
    return "".join(f"{line}\n" for line in lines)


def _block(text: str) -> str:
    if "\n" not in text or "'''" in text or re.search(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f]", text):
        return literal(text)
    return f"'''\n{text}\n'''"


def parse(name: str, path: Path, text: str) -> PromptTemplate:
    """A template from the text of its file. Raises UsageError naming the file, the key and what it must be."""
    where = f"template {path}"
    raw = _toml(text, where) if path.suffix == ".toml" else _markdown(text, where)
    variables = raw.pop("variables", {})
    given = {key.replace("-", "_"): value for key, value in raw.items()}
    if unknown := [key for key in given if key not in (*_TEXTS, "extract", *SETTINGS)]:
        raise UsageError(_unknown_key(unknown[0], where))
    texts = {key: _text(given.pop(key), key, where) for key in _TEXTS if key in given}
    texts |= {key: without_final_newline(texts[key]) for key in _BLOCKS if key in texts}
    extract = given.pop("extract", False)
    if not isinstance(extract, bool):
        raise UsageError(f"{where}: extract is {extract!r}; it must be true or false")
    template = PromptTemplate(
        name, path, **texts, extract=extract, defaults=_defaults(variables, where), settings=given
    )
    template.check()
    return template


def _defaults(variables: Any, where: str) -> dict[str, str]:
    if not isinstance(variables, dict):
        raise UsageError(f"{where}: variables is {variables!r}; it must be a table of names and their defaults")
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            raise UsageError(f"{where}: {name!r} cannot name a variable; use letters, digits and _")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise UsageError(f"{where}: the default of {name} is {value!r}; it must be a text (in quotes) or a number")
    return {name: str(value) for name, value in variables.items()}


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} is {value!r}; it must be a text (in quotes)")
    return value


def _unknown_key(key: str, where: str) -> str:
    known = (*_TEXTS, "extract", "variables", *SETTINGS)
    near = nearest(key, known)
    if key in ENTRIES:
        return f"{where}: {key} cannot be set by a template, only by flags and settings"
    return f"{where}: unknown key {key!r}." + (f" Did you mean {near!r}?" if near else f" Known: {', '.join(known)}.")


def _markdown(text: str, where: str) -> dict[str, Any]:
    """The text is the prompt; what stands above it between lines of --- is YAML, between lines of +++ TOML."""
    lines = text.split("\n")
    mark = lines[0].rstrip()
    if mark not in ("---", "+++"):
        return {"prompt": text}
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == mark), None)
    if end is None:
        raise UsageError(f"{where}: the settings above the text begin with {mark} and must end with it")
    head = "\n".join(lines[1:end])
    raw = _toml(head, where) if mark == "+++" else _yaml(head, where)
    if "prompt" in raw:
        raise UsageError(f"{where}: the text below is the prompt; remove prompt from the settings above it")
    return raw | {"prompt": "\n".join(lines[end + 1 :]).lstrip("\r\n")}


def _toml(text: str, where: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None


def _yaml(text: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise UsageError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{where}: the settings above the text must be lines of `name: value`")
    return raw
