"""Prompt templates: a prompt with places for variables, and the settings that it is asked with.

`{{ name }}` is a variable's text, `{{ name | file }}` the file it names, quoted in as --file does, `{{ name | text }}`
the file's bare content, `{{ "{{" }}` two braces. Values are put in once, as they are: nothing in them is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minicpm_cli.errors import UsageError
from minicpm_cli.settings import Layer
from minicpm_cli.settings_table import ENTRIES, nearest

INPUT = "input"  # what stands on the command line and comes from stdin
FILE, TEXT = "file", "text"
_PLACE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_VARIABLE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\|\s*(\w+)\s*)?")
_BRACES = re.compile(r"""\s*(["'])\{\{\1\s*""")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)

Read = Callable[[str, str], str]  # a file's path and FILE or TEXT, to what is put in


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """`defaults` are those of variables that need not be given; `settings` are checked where they are used."""

    name: str
    path: Path
    prompt: str = ""
    system: str | None = None
    description: str = ""
    prefill: str = ""
    extract: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"template {self.path}"

    @property
    def layer(self) -> Layer:
        return Layer(self.origin, self.settings)

    @property
    def variables(self) -> tuple[str, ...]:
        """In the order of their first places, `input` apart."""
        found = dict.fromkeys(name for text in (self.system or "", self.prompt) for name, _ in self._places(text))
        return tuple(name for name in found if name != INPUT)

    @property
    def takes_input(self) -> bool:
        return any(name == INPUT for text in (self.system or "", self.prompt) for name, _ in self._places(text))

    @property
    def reads_files(self) -> bool:
        return any(form is not None for text in (self.system or "", self.prompt) for _, form in self._places(text))

    def check(self) -> None:
        """Raises UsageError for what could never work."""
        for name, value in self.settings.items():
            ENTRIES[name].checked(value, self.origin)
        used = (*self.variables, INPUT)  # which raises, too
        unused = [name for name in self.defaults if name not in used]
        if unused:
            raise UsageError(
                f"{self.origin}: nothing uses the variable {unused[0]!r}; write {{{{ {unused[0]} }}}} in it"
            )

    def given(self, words: list[str]) -> tuple[dict[str, str], list[str]]:
        """The variables among the words of a command line, and the other words. Raises UsageError for unknown ones."""
        values, rest = {}, []
        for word in words:
            if match := _ASSIGNMENT.fullmatch(word):
                values[match[1]] = match[2]
            else:
                rest.append(word)
        unknown = [name for name in values if name not in self.variables]
        if unknown:
            raise UsageError(self._unknown(unknown))
        return values, rest

    def filled(self, values: Mapping[str, str], text: str, read: Read) -> tuple[str | None, str]:
        """The system prompt and the prompt. `text` is what else was said: it stands at `{{ input }}`, or at the end.

        Raises UsageError that names what is missing.
        """
        all_values = {**self.defaults, **values} | ({INPUT: text} if text else {})
        missing = [name for name in self.variables if name not in all_values]
        if missing:
            raise UsageError(f"{self.origin} needs {_names(missing)}: {self.usage}")
        if self.takes_input and INPUT not in all_values:
            raise UsageError(f"{self.origin} needs a text: name it on the command line or pipe it in")
        system = None if self.system is None else self._fill(self.system, all_values, read)
        prompt = self._fill(self.prompt, all_values, read)
        return system, prompt if self.takes_input else "\n\n".join(part for part in (prompt, text) if part)

    @property
    def usage(self) -> str:
        words = [f"{name}=..." if name not in self.defaults else f"[{name}=...]" for name in self.variables]
        return " ".join(["minicpm run --template", self.name, *words])

    def _places(self, text: str) -> Iterator[tuple[str, str | None]]:
        if "{{" in _PLACE.sub("", text):
            raise UsageError(f'{self.origin}: a {{{{ has no }}}} behind it; {{{{ "{{{{" }}}} stands for two braces')
        for place in _PLACE.finditer(text):
            if not _BRACES.fullmatch(place[1]):
                yield self._variable(place[1])

    def _variable(self, inside: str) -> tuple[str, str | None]:
        match = _VARIABLE.fullmatch(inside)
        if match is None:
            raise UsageError(
                f"{self.origin}: {{{{{inside}}}}} is no variable; write {{{{ name }}}}, {{{{ name | file }}}} or "
                '{{ name | text }}, and {{ "{{" }} for two braces'
            )
        name, form = match[1], match[2]
        if form not in (None, FILE, TEXT):
            raise UsageError(f"{self.origin}: {{{{{inside}}}}}: after the | comes file or text, not {form}")
        if form and name == INPUT:
            raise UsageError(f"{self.origin}: {{{{{inside}}}}}: {INPUT} is a text already, not the name of a file")
        return name, form

    def _fill(self, text: str, values: Mapping[str, str], read: Read) -> str:
        def value(place: re.Match[str]) -> str:
            if _BRACES.fullmatch(place[1]):
                return "{{"
            name, form = self._variable(place[1])
            if form is not None and not values[name]:
                raise UsageError(f"{self.origin}: {name} is to name a file, and is empty")
            return values[name] if form is None else read(values[name], form)

        return _PLACE.sub(value, text)

    def _unknown(self, names: list[str]) -> str:
        near = nearest(names[0], self.variables)
        known = f"its variables are {', '.join(self.variables)}" if self.variables else "it has none"
        return (
            f"{self.origin} has no {_names(names)}"
            + (f" (did you mean {near}?)" if near else "")
            + f"; {known}. A text that looks like one can be piped in."
        )


def _names(names: list[str]) -> str:
    return f"variable{'s' if len(names) > 1 else ''} {', '.join(names)}"
