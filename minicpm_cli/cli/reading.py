"""What is asked: files, words of the command line and stdin, put together."""

from __future__ import annotations

import codecs
import io
import os
import select
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minicpm_cli.chat.attach import bounded, decode, path_of, quoted, read_text, without_final_newline
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli.prompt_template import FILE, PromptTemplate
from minicpm_cli.cli.runtime import standard_input
from minicpm_cli.errors import UsageError

STDIN = "-"
ENCODINGS = ("utf-8", "utf-16", "latin-1", "cp1252", "gb18030", "big5", "shift_jis", "euc-kr", "koi8-r")
_NOT_OF_FILES = ("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape")
_CURES = ("Name its --encoding (utf-16, latin-1, gb18030, ...), or convert it first.", "Is it in another --encoding?")
_PATIENCE = 2.0  # seconds after which a pipe that gives nothing is named
_NO_PROMPT = (
    'there is no prompt: minicpm run "How many days are in a week?", or pipe one in (minicpm chat holds a conversation)'
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where text comes from. `pipe` is stdin, None at a terminal; `encoding` None is UTF-8, and nothing else."""

    terminal: Terminal
    pipe: BinaryIO | None
    encoding: str | None = None

    def question(self, words: list[str], files: list[Path]) -> str:
        """Files, then the words, then stdin, with blank lines between. Raises UsageError when there is nothing."""
        used = STDIN in map(str, files)
        parts = [*self._files(files), self._words(words), "" if used else self._stdin(words, files)]
        text = "\n\n".join(part for part in parts if part)
        if not text:
            raise UsageError("stdin is empty, and " + _NO_PROMPT if self.pipe else _NO_PROMPT)
        return text

    def filled(self, template: PromptTemplate, words: list[str], files: list[Path]) -> tuple[str | None, str]:
        """The system prompt and the question that a template makes of the variables and texts among `words`."""
        values, rest = template.given(words)
        used = STDIN in map(str, files) or STDIN in values.values()
        text = "\n\n".join(part for part in (self._words(rest), "" if used else self._stdin(rest, files)) if part)
        system, prompt = template.filled(values, text, self._file)
        question = "\n\n".join(part for part in (*self._files(files), prompt) if part)
        if not question:
            raise UsageError(f"{template.origin} has no prompt of its own, and {_NO_PROMPT}")
        return system, question

    @property
    def _cure(self) -> str:
        return _CURES[self.encoding is not None]

    def _words(self, words: list[str]) -> str:
        """An argument is bytes, too."""
        text = "" if words == [STDIN] else " ".join(words)
        return decode(os.fsencode(text), "the prompt", self.encoding, cure=self._cure) if _has_bytes(text) else text

    def _files(self, files: list[Path]) -> Iterator[str]:
        names = [path.name for path in files]
        for path in files:
            name = path.name if names.count(path.name) == 1 else str(path)
            yield self._quoted(str(path), name)

    def _file(self, path: str, form: str) -> str:
        """For a template's place."""
        return self._quoted(path, Path(path).name) if form == FILE else without_final_newline(self._text(path))

    def _quoted(self, path: str, name: str) -> str:
        return quoted("stdin" if path == STDIN else name, self._text(path))

    def _text(self, path: str) -> str:
        if path != STDIN:
            return read_text(Path(path), self.encoding, cure=self._cure)
        return decode(self._bytes(standard_input()), "stdin", self.encoding, cure=self._cure)

    def _stdin(self, words: list[str], files: list[Path]) -> str:
        """What is piped in; `-` as the only word reads it also at a terminal."""
        pipe = standard_input() if words == [STDIN] else self.pipe
        if pipe is None:
            return ""
        data = self._bytes(pipe)
        if not data and (words or files) and _is_pipe(pipe):
            self.terminal.note("stdin is empty, so the prompt is asked without it")
        return without_final_newline(decode(data, "stdin", self.encoding, cure=self._cure))

    def _bytes(self, pipe: BinaryIO) -> bytes:
        if _is_pipe(pipe) and not _ready(pipe):
            self.terminal.note("waiting for stdin (< /dev/null where there is nothing to read)")
        return bounded(pipe, "stdin")


def known_encoding(name: str | None) -> str | None:
    """Raises UsageError for a name that is no encoding of text."""
    if name is None:
        return None
    try:
        found = codecs.lookup(name)
        io.TextIOWrapper(io.BytesIO(), encoding=name)  # refuses what is no encoding of text, such as base64
        if found.name in _NOT_OF_FILES:
            raise LookupError
    except (LookupError, ValueError):
        raise UsageError(
            f"--encoding is {name!r}; it must be an encoding of text that Python knows: {', '.join(ENCODINGS)}, ..."
        ) from None
    return None if found.name == "utf-8" else found.name


def stray_model(words: list[str]) -> str | None:
    """The first word where it is a model's name, as `ollama run MODEL PROMPT` has it."""
    from minicpm_cli.hub.catalog import CATALOG

    return words[0] if words and words[0] in {entry.alias for entry in CATALOG} else None


def stray_files(words: list[str], files: list[Path]) -> list[str]:
    """Words of the prompt that were perhaps meant as files: a shell turns `-f *.py` into `-f a.py b.py`."""
    suffixes = {path.suffix for path in files if path.suffix}
    return [word for word in words if Path(word).suffix in suffixes and path_of(word).is_file()] if files else []


def _has_bytes(text: str) -> bool:
    """Whether Python could not tell what some of an argument says."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _is_pipe(stream: BinaryIO) -> bool:
    with suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


def _ready(pipe: BinaryIO) -> bool:
    with suppress(OSError, ValueError):
        return bool(select.select([pipe], [], [], _PATIENCE)[0])
    return True
