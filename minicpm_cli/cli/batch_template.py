"""--template of `minicpm batch`: a prompt template whose variables are keys of each line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minicpm_cli.cli.prompt_template import PromptTemplate
from minicpm_cli.cli.template_files import TemplateFolder
from minicpm_cli.errors import RequestError, UsageError

_INPUT = "prompt"  # the key of what stands at {{ input }}


@dataclass(frozen=True, slots=True)
class LineTemplate:
    template: PromptTemplate

    @classmethod
    def of_user(cls, name: str) -> LineTemplate:
        """Raises UsageError for a template that does what a batch does not do."""
        found = TemplateFolder.of_user().find(name)
        if found.reads_files:
            raise UsageError(
                f"{found.origin} reads files; lines bring their texts themselves: write {{{{ name }}}} without | file"
            )
        for setting in ("prefill", "extract"):
            if getattr(found, setting):
                raise UsageError(f"{found.origin} has {setting}, which only minicpm run does")
        return cls(found)

    @property
    def record(self) -> dict[str, Any]:
        """What shapes the answers, for the manifest."""
        found = self.template
        return {"system": found.system, "prompt": found.prompt, "defaults": dict(found.defaults)}

    def __call__(self, line: Mapping[str, Any]) -> tuple[str | None, str]:
        """The system prompt and the prompt of a line. Raises RequestError."""
        found = self.template
        values = {name: _text(name, line[name]) for name in found.variables if line.get(name) is not None}
        missing = [name for name in found.variables if name not in values and name not in found.defaults]
        text = line.get(_INPUT)
        text = "" if text is None or _INPUT in values else _text(_INPUT, text)
        if found.takes_input and not text:
            missing.append(_INPUT)
        if missing:
            raise RequestError("missing_prompt", f"the line has no {', '.join(missing)}, which {found.origin} needs")
        system, prompt = found.filled(values, text, _no_file)
        if not prompt:
            raise RequestError("missing_prompt", f"{found.origin} has no prompt of its own, and the line has none")
        return system, prompt


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict | list):
        raise RequestError("bad_parameter", f"{name} is neither a text nor a number")
    return value if isinstance(value, str) else json.dumps(value)


def _no_file(path: str, form: str) -> str:
    raise AssertionError("such templates are refused")
