"""How a checkpoint writes its tool calls, told by what its chat template teaches it to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from minicpm_cli.text.tool_blocks import Forced, Tags
from minicpm_cli.text.tool_preview import Growing, Reading
from minicpm_cli.text.tools_hermes import Hermes
from minicpm_cli.text.tools_minicpm3 import MiniCPM3
from minicpm_cli.text.tools_minicpm5 import MiniCPM5
from minicpm_cli.types import Tool


class ToolFormat(Protocol):
    @property
    def tags(self) -> Tags: ...

    @property
    def shown(self) -> Sequence[str]:
        """Control tokens that are part of a call's text."""
        ...

    def begins(self, raw: str) -> bool:
        """Whether `raw`, which starts with the opening tag, can still become a call."""
        ...

    def parse(self, raw: str, tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
        """(name, arguments as JSON) of the calls in a block with its tags; the ending one may be missing.

        Raises Malformed, and whatever the parsers of Python and JSON raise.
        """
        ...

    def preview(self, text: Growing, tools: Mapping[str, Tool]) -> Reading:
        """What is certain of a block that is not whole. Raises as `parse`."""
        ...

    def forced(self, tools: Sequence[Tool]) -> Forced:
        """How an answer is made to call one of these."""
        ...

    def held(self, tools: Sequence[Tool]) -> str:
        """The rules of an answer that may call, and whose calls are of the tools' schemas; see `tool_rules`."""
        ...

    def refuses(self, tool: Tool) -> str | None:
        """Why the tool cannot be called in this format."""
        ...


def format_of(template: str) -> ToolFormat | None:
    """The format that a template's source speaks of; None for one that is not known."""
    if "<|tool_call_start|>" in template:
        return MiniCPM3()
    if "<function name=" in template and "<param name=" in template:
        return MiniCPM5()
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return Hermes()
    return None
