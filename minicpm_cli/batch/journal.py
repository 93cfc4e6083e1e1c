"""OUT as a journal: each row is on disk as it finishes, and after any crash the file says exactly what is done.

A row is handed to the system whole and at once: a killed process loses no row that it reported. It is fsynced within
a second or two (a power cut loses the rows of that time at most), in a thread: a slow disk would keep a GPU waiting.
Whatever goes wrong in a write, the file is cut back to its last complete row; whatever could not even be cut is cut
when the next run opens it. A file that another program writes to is never cut.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from minicpm_cli.batch.files import failed, replace_file
from minicpm_cli.batch.keys import HashSet, Id, id_key, key_hash, line_key
from minicpm_cli.batch.syncs import Syncs
from minicpm_cli.errors import FileError

_DECODER = json.JSONDecoder()  # json.loads of bytes takes half as long again


class Output(Protocol):
    def append(self, row: bytes) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Past:
    """What an output file holds: the hashes of the finished rows' keys, how many are good, and the errors by code."""

    done: HashSet = field(default_factory=HashSet)
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Journal:
    """Appends rows to a file that `recover` has made whole. Raises FileError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self._end = os.fstat(self._file.fileno()).st_size
        except OSError as e:
            raise failed("write", path, e) from e
        self._path = path
        self._torn = False  # a row is being written, or could not be
        self._syncs = Syncs(self._file.fileno())
        self._looked = 0

    def append(self, row: bytes) -> None:
        try:
            self._syncs.check()
            self._torn = True
            write_all(self._file, row)
            self._end += len(row)
            self._torn = False
            if self._looked != self._syncs.done:
                self._looked = self._syncs.done
                self._still_there()
            self._syncs.want()
        except OSError as e:
            self._cut()
            raise failed("write", self._path, e) from e

    def close(self) -> None:
        """Leaves complete rows only, on disk."""
        if self._file.closed:
            return
        try:
            self._cut()
            self._syncs.close()
            self._syncs.check()  # the system tells an error of this kind once
            os.fsync(self._file.fileno())
            self._still_there()
        except OSError as e:
            raise failed("write", self._path, e) from e
        finally:
            self._syncs.close()
            self._file.close()

    def _still_there(self) -> None:
        ours = os.fstat(self._file.fileno())
        if ours.st_size != self._end and not self._torn:
            raise FileError(
                f"{self._path} was changed by another program while it was being written: it has {ours.st_size} bytes "
                f"instead of {self._end}. Stop that program, look at the file, and run the same command again."
            )
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
            raise FileError(
                f"{self._path} was removed or replaced while it was being written; "
                "the rows written since are lost. Put it back and run the same command again."
            )

    def _cut(self) -> None:
        if not self._torn:
            return
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_size > self._end:
                self._file.truncate(self._end)
            self._torn = False


class StreamOutput:
    """Rows to stdout, a pipe or a device. A BrokenPipeError passes through: the reader has gone, that is no error."""

    def __init__(self, stream: BinaryIO | IO[bytes], name: str, *, owned: bool) -> None:
        self._stream, self._name, self._owned = stream, name, owned

    def append(self, row: bytes) -> None:
        try:
            write_all(self._stream, row)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as e:
            raise failed("write", self._name, e) from e

    def close(self) -> None:
        if self._owned:
            with suppress(OSError):
                self._stream.close()


def write_all(stream: BinaryIO | IO[bytes], data: bytes) -> None:
    """A raw file may take a part only."""
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) or 0 :]


def recover(path: Path, *, drop_errors: bool, lenient: bool, redo: bytes | None = None) -> Past:
    """Makes the file whole (a torn last row is cut off, a missing last newline added) and reads what is done.

    `drop_errors` takes the error rows out, through a copy that is renamed into place; `redo` does so with that of one
    key. A line in the middle that is
    no output row raises FileError, unless `lenient`: then it stays and counts for nothing.
    """
    try:
        finished, failed_keys, past = array("Q"), array("Q"), Past()
        dropped = 0
        for key, code in _whole_rows(path, lenient=lenient):
            if code is None:
                finished.append(key_hash(key))
            elif drop_errors or key == redo:
                dropped += 1
            else:
                failed_keys.append(key_hash(key))
                past.errors[code] += 1
        past.ok = len(finished)
        finished.extend(failed_keys)
        past.done = HashSet(finished)
    except OSError as e:
        raise failed("read", path, e) from e
    if dropped:
        _drop_errors(path, None if drop_errors else redo)
    return past


def row_key(row: dict[str, Any]) -> tuple[bytes, str | None]:
    """(key, error code or None) of an output row. Raises ValueError for what is no output row.

    An error row whose id is its own line number may stand for a line without a readable id, so it counts for the line.
    """
    id_, code = _id(row), _error_code(row)
    by_line = code is not None and id_ == _error_line(row)
    return line_key(int(id_)) if by_line else id_key(id_), code


def _id(row: dict[str, Any]) -> Id:
    value = row["custom_id"] if "custom_id" in row else row.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("no id")
    return value


def _error_code(row: dict[str, Any]) -> str | None:
    error = row.get("error")
    if error is None:
        if "text" not in row and "response" not in row:
            raise ValueError("neither an answer nor an error")
        return None
    return str(error.get("code", "internal")) if isinstance(error, dict) else "internal"


def _error_line(row: dict[str, Any]) -> Any:
    return row["error"].get("line") if "custom_id" in row and isinstance(row["error"], dict) else row.get("line")


def _is_error(raw: bytes, key: bytes | None) -> bool:
    """An error row; with a `key`, that of this key."""
    row = read_row(raw)
    return row is not None and row[1] is not None and key in (None, row[0])


def read_row(raw: bytes) -> tuple[bytes, str | None] | None:
    """`row_key` of a line, None for one that is no output row."""
    try:
        row, end = _DECODER.raw_decode(text := raw.decode("utf-8"))
        if text[end:] not in ("\n", ""):
            return _foreign_row(raw)
    except (ValueError, RecursionError):
        return _foreign_row(raw)
    return _row_key(row)


def _foreign_row(raw: bytes) -> tuple[bytes, str | None] | None:
    """A row with spaces around it or a BOM, as editors leave it, or of another encoding."""
    try:
        return _row_key(json.loads(raw))
    except (ValueError, RecursionError):
        return None


def _row_key(row: Any) -> tuple[bytes, str | None] | None:
    try:
        return row_key(row) if isinstance(row, dict) else None
    except ValueError:
        return None


def rows_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, row with its newline). Rows are ours: however long, they are read whole."""
    offset = 0
    with open(path, "rb") as f:
        for raw in f:
            yield offset, raw
            offset += len(raw)


def _whole_rows(path: Path, *, lenient: bool) -> Iterator[tuple[bytes, str | None]]:
    """`row_key` of each row. At the end the file is made whole."""
    for number, (offset, raw) in enumerate(rows_of(path), 1):
        row = read_row(raw)
        if row is not None:
            yield row
        if not raw.endswith(b"\n"):
            _mend(path, None if row is not None else offset)
        elif row is None and raw.strip() and not lenient:
            raise FileError(
                f"Line {number} of {path} (byte {offset}) is no output row. "
                "Give another OUT, repair that line, or start again with --overwrite."
            )


def _mend(path: Path, torn_at: int | None) -> None:
    """Cuts a torn last row off at its first byte; a complete one only lacks its newline."""
    try:
        with open(path, "r+b", buffering=0) as f:
            if torn_at is not None:
                f.truncate(torn_at)
            else:
                f.seek(0, os.SEEK_END)
                write_all(f, b"\n")
    except OSError as e:
        raise failed("mend", path, e) from e


def _drop_errors(path: Path, key: bytes | None) -> None:
    def write(target: IO[bytes]) -> None:
        for _, raw in rows_of(path):
            if not _is_error(raw, key):
                target.write(raw)

    replace_file(path, write)
