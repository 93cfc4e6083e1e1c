"""Writing that a crash cannot tear, a lock that two processes cannot both hold, and what may not be what."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from minicpm_cli.disk import sync_folder
from minicpm_cli.errors import FileError, UsageError

STREAM = "-"
_STREAMS: Mapping[str, int] = {"/dev/stdout": 1, "/dev/stderr": 2}  # opened by name they would be emptied


def failed(action: str, path: Path | str, error: OSError) -> FileError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "Free some space and run the same command again." if full else "Check the path and its permissions."
    return FileError(f"Cannot {action} {path}: {error.strerror or error}. {remedy}")


def replace_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """`path` with what `write` writes, or as it was before: temporary file, fsync, rename. Raises FileError.

    A file that was there keeps its permissions.
    """
    aside = _aside(path)
    try:
        with open(aside, "wb") as f:
            with suppress(OSError):
                shutil.copymode(path, aside)
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as e:
        raise failed("write", path, e) from e
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    """Named so that nobody has such a file of his own: it is overwritten, and removed."""
    return path.with_name(f".{path.name}.minicpm-part")


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.minicpm-lock")


def files_beside(path: Path) -> list[Path]:
    """What may come and go while `path` is written."""
    return [_aside(path), _lock(path)]


def forget_aside(path: Path) -> None:
    """Removes what a process that was killed in `replace_file` has left. For the holder of the lock."""
    with suppress(OSError):
        _aside(path).unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Links to the file lead to the new one; a pipe, a device and our own streams are written to. Raises FileError."""
    text = json.dumps(content, indent=2, allow_nan=False).encode("ascii") + b"\n"
    try:
        place = path.resolve()
        ours = _STREAMS.get(str(path))
        if ours is None and (not place.exists() or place.is_file()):
            return replace_file(place, lambda f: void(f.write(text)))
        with open(path if ours is None else ours, "wb", buffering=0, closefd=ours is None) as f:
            f.write(text)
    except (OSError, RuntimeError) as e:  # RuntimeError: links in a circle
        raise failed("write", path, e if isinstance(e, OSError) else OSError(errno.ELOOP, str(e))) from e


def void(_: object) -> None:
    """For lambdas whose value nobody wants."""


def is_plain(path: str | Path) -> bool:
    """A regular file, as opposed to '-', a pipe or a device."""
    try:
        return str(path) != STREAM and stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def same_file(a: str, b: str) -> bool:
    """Whether both name one regular file: by path, symlink, hard link, or as our own stdin or stdout."""
    one, other = _status(a, 0), _status(b, 1)
    if one is None or other is None:
        return False
    return stat.S_ISREG(one.st_mode) and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _status(path: str, descriptor: int) -> os.stat_result | None:
    try:
        return os.fstat(descriptor) if path == STREAM else os.stat(path)
    except OSError:
        return None


class Lock:
    """A file beside `path`, held by one process at a time and by none that has died. Raises UsageError when taken."""

    def __init__(self, path: Path) -> None:
        self._path = _lock(path)
        self._file = self._take(path)

    def _take(self, guarded: Path) -> IO[bytes]:
        while True:
            try:
                file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 (held until release)
            except OSError as e:
                raise failed("lock", guarded, e) from e
            if not _try_lock(file):
                file.close()
                raise UsageError(
                    f"{guarded} is being written by another minicpm batch. Wait for it, or give another OUT."
                )
            if self._still_there(file):
                return file
            file.close()  # its holder removed it between our open and our lock

    def _still_there(self, file: IO[bytes]) -> bool:
        try:
            here, there = os.fstat(file.fileno()), os.stat(self._path)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Removes the file first: whoever opened it meanwhile sees that it is gone and tries again."""
        with suppress(OSError):
            self._path.unlink()
        self._file.close()
        with suppress(OSError):  # Windows removes no open file
            if os.name == "nt":
                self._path.unlink()


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            getattr(msvcrt, "locking")(file.fileno(), getattr(msvcrt, "LK_NBLCK"), 1)  # noqa: B009
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        # A file system without locks (some network mounts) is no reason not to run at all.
        return e.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True
