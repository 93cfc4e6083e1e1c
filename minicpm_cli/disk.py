"""What whoever finds files, and keeps them through a power cut or from other people's eyes, needs of the system."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path


def path_of(text: str | Path) -> Path:
    """The path that a user gave; ~NAME of a user that does not exist stays as it is, where pathlib raises."""
    return Path(os.path.expanduser(text))


def sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system allows it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def private_folder(path: Path) -> Path:
    """Makes the folder and those above it that are missing, each for the user alone; those that are there stay.

    `Path.mkdir(parents=True, mode=0o700)` makes the parents as the umask has it.
    """
    missing = list(takewhile(lambda folder: not folder.is_dir(), [path, *path.parents]))
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))
    return path


def write_private(path: Path, text: str) -> None:
    """Replaces a file as a whole, readable by the user alone whatever the umask, and lasting. Raises OSError."""
    private_folder(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
