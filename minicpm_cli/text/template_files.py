"""Where checkpoints keep their chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.errors import TemplateError, TokenizerError
from minicpm_cli.hub.files import read_json
from minicpm_cli.model.gguf import read_header


@dataclass(frozen=True, slots=True)
class TemplateSource:
    source: str
    origin: str


def find_template(files: Path) -> TemplateSource | None:
    """chat_template.jinja, tokenizer_config.json or chat_template.json of a folder; the metadata of a GGUF file."""
    if not files.is_dir():
        source = read_header(files).metadata.get("tokenizer.chat_template")
        return TemplateSource(source, str(files)) if isinstance(source, str) and source else None
    jinja = files / "chat_template.jinja"
    if jinja.is_file():
        return TemplateSource(_read(jinja), str(jinja))
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _choose(read_json(files / name, TokenizerError, required=False).get("chat_template"), files / name)
        if found is not None:
            return TemplateSource(found, str(files / name))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: cannot be read ({error}). Download the file again.") from error


def _choose(value: Any, path: Path) -> str | None:
    """The one template, or the one named "default" of several."""
    if value is None or isinstance(value, str):
        return value
    named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)} if isinstance(value, list) else {}
    chosen = named.get("default", next(iter(named.values()), None))
    if not isinstance(chosen, str):
        raise TemplateError(f"{path}: chat_template is neither a text nor a list of named ones. Give --chat-template.")
    return chosen
