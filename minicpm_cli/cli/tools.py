"""--tools and --tool-choice: what the model may call, read from a file of OpenAI's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minicpm_cli.errors import FileError, RequestError, UsageError
from minicpm_cli.text.tools import tool_choice_of, tools_of
from minicpm_cli.types import Tool, ToolChoice


def read_tools(path: Path | None, choice: str | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Raises UsageError or FileError. `choice` is auto, none, required or the name of a tool."""
    if path is None:
        if choice is not None:
            raise UsageError("--tool-choice chooses among --tools FILE, which is missing")
        return (), ToolChoice()
    try:
        tools = tools_of(_json(path))
        return tools, tool_choice_of(_wanted(choice), tools, "--tool-choice")
    except RequestError as error:
        raise UsageError(f"{path}: {error}" if "--tool-choice" not in str(error) else str(error)) from None


def _wanted(choice: str | None) -> Any:
    plain = choice in (None, "auto", "none", "required")
    return choice if plain else {"type": "function", "function": {"name": choice}}


def _json(path: Path) -> Any:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    return given["tools"] if isinstance(given, dict) and "tools" in given else given
