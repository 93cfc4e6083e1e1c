"""What a command works with: settings, the terminal, and how a model is opened. Tests open other models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TextIO

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import opening
from minicpm_cli.errors import RequestError, UsageError
from minicpm_cli.llm.info import LanguageModel, Prompts
from minicpm_cli.settings import Layer, Settings
from minicpm_cli.types import SamplingParams

ACCEPTED = "--trust-remote-code is not needed: no code of a checkpoint is ever run"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The outside world. `stdin` is None where the process has none."""

    open_llm: Callable[[Settings, Terminal], LanguageModel] = opening.open_llm
    open_prompts: Callable[[Settings, Terminal], Prompts] = opening.open_prompts


@dataclass(slots=True)
class Invocation:
    """One run of the program; every command gets it as its context's object."""

    runtime: Runtime
    terminal: Terminal = field(default_factory=lambda: Terminal(_stream(sys.stdout), _stream(sys.stderr)))

    def configure(self, flags: Mapping[str, Any], *layers: Layer | None) -> Settings:
        """The settings of this run, checked; `layers` are weaker than flags, the first one the weakest.

        What is accepted for the habit of other tools is dealt with here.
        """
        given = dict(flags)
        habit, path = given.pop("trust_remote_code", None), given.pop("model_path", None)
        if path is not None:
            if given.get("model") not in (None, path):
                raise UsageError(f"--model names {given['model']}, --model-path names {path}; give one of the two")
            given["model"] = path
        settings = Settings.load(given, layers=[layer for layer in layers if layer])
        self.terminal = replace(
            self.terminal,
            color=settings.color,
            plain=settings.plain,
            quiet=settings.quiet,
            verbose=settings.verbose,
        )
        check_grammar(settings)
        for note in (*settings.notes, *([ACCEPTED] if habit else ())):
            self.terminal.note(note)
        return opening.with_adapter_here(settings, self.terminal) if "lora" in given else settings

    @contextmanager
    def model(self, settings: Settings) -> Iterator[LanguageModel]:
        """The language model, closed at the end; its notes are said once."""
        llm = self.runtime.open_llm(settings, self.terminal)
        try:
            for note in llm.info.notes:
                self.terminal.note(note)
            if settings.sampling.get("think") and not llm.info.has_think_switch:
                where = settings.origin("think").removeprefix("flag ")
                self.terminal.note(f"{where} changes nothing: the chat template has no switch for thinking")
            yield llm
        finally:
            llm.close()

    def verbose(self, argv: Sequence[str]) -> bool:
        """Also before the settings are known."""
        return self.terminal.verbose or "-v" in argv or "--verbose" in argv


def check_grammar(settings: Settings) -> None:
    """Before anything is loaded. Raises UsageError that names where the schema or regex comes from."""
    asked = [name for name in ("schema", "regex") if name in settings.sampling]
    if not asked:
        return
    from minicpm_cli.grammar.source import check

    try:
        check(SamplingParams().checked(settings.sampling))
    except RequestError as error:
        raise UsageError(f"{' and '.join(settings.origin(name) for name in asked)}: {error}") from None


def stdin_bytes() -> BinaryIO | None:
    """Standard input when it is a file or a pipe; None at a terminal, or where there is none."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    return sys.stdin.buffer


def standard_input() -> BinaryIO:
    """Also where it is a terminal. Raises UsageError where the process has none."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("there is no stdin to read: it is closed")
    return sys.stdin.buffer


def _stream(stream: TextIO | None) -> TextIO:
    """UTF-8 whatever the locale says when piped; at a terminal, what it cannot show becomes '?'.

    A stream that was closed (`>&-`) takes what is written and drops it.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        if stream.isatty():
            stream.reconfigure(errors="replace")
        else:
            stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    return stream
