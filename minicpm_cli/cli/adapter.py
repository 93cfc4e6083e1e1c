"""A conversation goes on with the LoRA adapter that it was held with, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minicpm_cli.chat.conversation import Turn
from minicpm_cli.chat.made import Source
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import Settings

FLAG = "flag --lora"  # where a value comes from that the user chose for this command


def refuse_another_adapter(turns: Sequence[Turn], settings: Settings) -> None:
    """Before anything is loaded. Raises UsageError."""
    source = next((turn.made.source for turn in reversed(turns) if turn.made), None)
    if source is None or settings.origin("lora") == FLAG:
        return
    lora = None if settings.options.server else settings.options.lora  # a server has what it was started with
    if _digest(lora) != source.adapter:
        now = f"now it is {lora}" if lora else "now there is none"
        raise UsageError(
            f"this conversation was held {_told(source)}, and {now}. Give --lora DIR, or --lora none, to go on so."
        )


def _digest(lora: str | None) -> str:
    from minicpm_cli.model.lora_files import identity

    return identity(Path(lora))["sha256"] if lora else ""


def _told(source: Source) -> str:
    if not source.adapter:
        return "without a LoRA adapter"
    return f"with the LoRA adapter {source.load.get('lora', '')} of sha256 {source.adapter[:8]}"
