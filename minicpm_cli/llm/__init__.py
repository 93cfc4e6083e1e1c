"""Messages -> tokens -> engine -> text events: the one place where text meets tokens.

`LLM` is imported on first use, since it brings torch along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minicpm_cli.llm.info import LanguageModel, LLMInfo, Prompts

if TYPE_CHECKING:
    from minicpm_cli.llm.llm import LLM
    from minicpm_cli.llm.prompter import Prompter

__all__ = ["LLM", "LLMInfo", "LanguageModel", "Prompter", "Prompts"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minicpm_cli.llm.llm import LLM

        return LLM
    if name == "Prompter":
        from minicpm_cli.llm.prompter import Prompter

        return Prompter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
