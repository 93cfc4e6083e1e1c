"""Conversations on disk: one JSON line a message, appended as it happens, readable by the user alone."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.types import ROLES, Message

_NAME = re.compile(r"[^\W.][\w.-]{0,99}")
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Transcript:
    """One session file. A change of the past rewrites it whole, and atomically."""

    path: Path

    def append(self, turn: Turn) -> None:
        self._write(self.path, os.O_APPEND, [turn])

    def rewrite(self, turns: Sequence[Turn]) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        self._write(temporary, os.O_TRUNC, turns)
        try:
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._unwritable(error) from None

    def read(self) -> list[Turn]:
        """The turns; a last line that was torn by a crash is left out. Raises FileError for any other bad line."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise FileError(f"cannot read the session {self.path}: {error.strerror or error}") from None
        lines = data.split(b"\n")
        whole = lines if self._parses(lines[-1]) else lines[:-1]
        return [self._turn(number, line) for number, line in enumerate(whole, 1) if line.strip()]

    @property
    def torn(self) -> bool:
        """Whether the last line has no end, so that nothing may be appended to it."""
        return not self.path.read_bytes().endswith(b"\n")

    def _write(self, path: Path, mode: int, turns: Sequence[Turn]) -> None:
        text = "".join(json.dumps(_record(turn), ensure_ascii=False) + "\n" for turn in turns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600), "wb") as file:
                file.write(text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> FileError:
        return FileError(f"cannot write the session {self.path}: {error.strerror or error}. Check its folder.")

    def _parses(self, line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return True

    def _turn(self, number: int, line: bytes) -> Turn:
        try:
            return _turn(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise FileError(f"{self.path}, line {number} is not a message: {error}. Mend or delete the line.") from None


@dataclass(frozen=True, slots=True)
class Sessions:
    """The folder of all sessions."""

    folder: Path

    def path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a session: use letters, digits, '.', '-' and '_', at most 100, no '.' first"
            )
        return self.folder / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Newest first."""
        paths = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"*{SUFFIX}")]
        return [path.stem for _, path in sorted(paths, reverse=True)]

    def latest(self) -> str:
        """Raises UsageError when there is none."""
        names = self.names()
        if not names:
            raise UsageError(f"there is no conversation to continue in {self.folder}. Start one: minicpm chat")
        return names[0]

    def open(self, name: str) -> Conversation:
        """The conversation of that name, begun if there is none."""
        transcript = self.transcript(name)
        turns = transcript.read() if transcript.path.exists() else []
        if turns and transcript.torn:
            transcript.rewrite(turns)
        return Conversation(turns, transcript)

    def transcript(self, name: str) -> Transcript:
        return Transcript(self.path(name))

    def fresh(self) -> str:
        """A name for a new session: its time, numbered when that is taken."""
        stem = time.strftime("%Y-%m-%d-%H%M%S")
        names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
        return next(name for name in names if not self.path(name).exists())


def _record(turn: Turn) -> dict[str, Any]:
    message = turn.message
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        record["reasoning"] = message.reasoning
    return record | ({"partial": True} if turn.partial else {}) | {"time": int(time.time())}


def _turn(record: Any) -> Turn:
    if not isinstance(record, dict) or record.get("role") not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}")
    content, reasoning = record.get("content"), record.get("reasoning")
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise ValueError("content and reasoning must be strings")
    return Turn(Message(record["role"], content, reasoning), record.get("partial") is True)
