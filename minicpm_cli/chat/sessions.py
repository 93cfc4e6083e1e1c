"""Conversations on disk: one JSON line a message, appended as it happens, readable by the user alone."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.chat import made
from minicpm_cli.chat.attach import unicode
from minicpm_cli.chat.claim import Claim, lock_of
from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.disk import private_folder, sync_folder
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.types import ROLES, Message

_WORD = re.compile(r"[^\W.][\w.-]{0,99}")
_MOST_BYTES = 220  # of the 255 that file systems allow; the rest is for suffixes
SUFFIX = ".jsonl"
FORK = "+"  # holidays+paris is the branch paris of the session holidays
TRUNK = "main"  # what a session is called among its branches


@dataclass(frozen=True, slots=True)
class Transcript:
    """One session file. A change of the past rewrites it whole and atomically; what is written outlives a power cut."""

    path: Path

    def append(self, turn: Turn) -> None:
        try:
            size = self.path.stat().st_size if self.path.exists() else None
            self._write(self.path, os.O_APPEND, [turn])
        except OSError as error:
            with suppress(OSError):  # half a line would swallow the next one
                if size is not None:
                    os.truncate(self.path, size)
            raise self._unwritable(error) from None

    def rewrite(self, turns: Sequence[Turn]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self._write(temporary, os.O_TRUNC, turns)
            os.replace(temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            with suppress(OSError):
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
        private_folder(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())

    def _unwritable(self, error: OSError) -> FileError:
        return FileError(f"cannot write the session {self.path}: {error.strerror or error}. Check its folder.")

    def _parses(self, line: bytes) -> bool:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return False
        return True

    def _turn(self, number: int, line: bytes) -> Turn:
        try:
            return _turn(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FileError(f"{self.path}, line {number} is not a message: {error}. Mend or delete the line.") from None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list of sessions shows; `seconds` since its last change, `first` is how its first question begins."""

    name: str
    seconds: float
    questions: int = 0
    first: str = "(not readable)"

    def told(self) -> str:
        count = f"{self.questions} question{'' if self.questions == 1 else 's'}"
        return f"{_ago(self.seconds)}, {count}: {self.first}"


@dataclass(frozen=True, slots=True)
class Sessions:
    """The folder of all sessions."""

    folder: Path

    def path(self, name: str) -> Path:
        root, fork, branch = name.partition(FORK)
        fits = _WORD.fullmatch(root) and (not fork or _WORD.fullmatch(branch))
        if not fits or len(os.fsencode(name)) > _MOST_BYTES:
            raise UsageError(
                f"{name!r} cannot name a session: use letters, digits, '.', '-' and '_', at most 100, no '.' first"
            )
        return self.folder / f"{name}{SUFFIX}"

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def branch(self, name: str, branch: str) -> str:
        """The session's name of `branch` of the session `name`, which may be a branch itself."""
        root = name.partition(FORK)[0]
        if FORK in branch:
            raise UsageError(f"{branch!r} cannot name a branch: use letters, digits, '.', '-' and '_'")
        return root if branch == TRUNK else root + FORK + branch

    def branches(self, name: str) -> list[str]:
        """The branches of a session, the trunk first, then the newest."""
        root = name.partition(FORK)[0] + FORK
        return [TRUNK, *(found.removeprefix(root) for found in self.names() if found.startswith(root))]

    def names(self) -> list[str]:
        """Newest first."""
        return [path.name.removesuffix(SUFFIX) for _, path in sorted(self._dated(), reverse=True)]

    def summaries(self, most: int = 30) -> list[Summary]:
        """The newest `most` sessions."""
        now = time.time()
        return [self._summary(path, now - when / 1e9) for when, path in sorted(self._dated(), reverse=True)[:most]]

    def _summary(self, path: Path, seconds: float) -> Summary:
        name = path.name.removesuffix(SUFFIX)
        try:
            asked = [turn.message.content for turn in Transcript(path).read() if turn.message.role == "user"]
        except FileError:
            return Summary(name, seconds)
        return Summary(name, seconds, len(asked), beginning(asked[0]) if asked else "")

    def _dated(self) -> Iterator[tuple[int, Path]]:
        """Files with the time of their last change; left out is what no session can be called, or goes meanwhile."""
        for path in self.folder.glob(f"[!.]*{SUFFIX}"):
            with suppress(FileNotFoundError, UsageError):
                yield self.path(path.name.removesuffix(SUFFIX)).stat().st_mtime_ns, path

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

    def claim(self, name: str, patience: float = 0.0) -> Claim:
        """For whoever writes to it. Raises UsageError when it is open elsewhere, also after so many seconds."""
        return Claim(self.path(name), patience)

    def transcript(self, name: str) -> Transcript:
        return Transcript(self.path(name))

    def fresh(self) -> str:
        """A name for a new session: its time, numbered when that is taken, also by one that has said nothing yet."""
        stem = time.strftime("%Y-%m-%d-%H%M%S")
        names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
        return next(name for name in names if not self.exists(name) and not lock_of(self.path(name)).exists())


def beginning(text: str) -> str:
    """How a message begins, in one line."""
    return " ".join(text.split())[:40]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "now"


def _record(turn: Turn) -> dict[str, Any]:
    message = turn.message
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        record["reasoning"] = message.reasoning
    marks = {name: True for name in ("partial", "edited") if getattr(turn, name)}
    return record | marks | (made.record(turn.made) if turn.made else {}) | {"time": turn.time}


def _turn(record: Any) -> Turn:
    if not isinstance(record, dict) or record.get("role") not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}")
    content, reasoning, when = record.get("content"), record.get("reasoning"), record.get("time")
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise ValueError("content and reasoning must be strings")
    message = Message(record["role"], unicode(content), None if reasoning is None else unicode(reasoning))
    when = when if isinstance(when, int) else int(time.time())
    return Turn(message, record.get("partial") is True, made.read(record), record.get("edited") is True, when)
