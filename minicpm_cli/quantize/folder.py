"""The work folder beside OUT: what is done of a quantization, such that a kill at any moment loses one block at most.

OUT.partial holds manifest.json (what is being made), the calibration tokens and one file a finished block. A file is
written aside, synced and renamed, so that one that has its name is whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from minicpm_cli.disk import sync_folder
from minicpm_cli.errors import FileError, UsageError, WeightsError

SUFFIX, LOCK = ".partial", "lock"
MANIFEST = "manifest.json"
CHEAP = ("outer.safetensors",)  # parts that are only copied
_NAMED = "quantizing"  # the key that tells our manifest from anybody's JSON file


class WorkFolder:
    """One quantization on its way to `target`. A lock keeps a second process out while it is open."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + SUFFIX)
        self._lock: IO[bytes] | None = None

    def open(self, manifest: Mapping[str, Any], *, fresh: bool = False) -> bool:
        """Begins, or goes on with, what `manifest` describes; True if there was something to go on with.

        `fresh` drops what is there. Raises UsageError for a target that is in use or work of other settings, FileError.
        """
        if not self.path.exists():
            check_target(self.target)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if fresh:
                self._clear()
            known = self._known()
            if known is not None and known != _plain(manifest) and not self._costly():
                known = None
            if known is None:
                self._clear()
                write_json(self.path / MANIFEST, {_NAMED: dict(manifest)})
                return False
        except OSError as error:
            raise failed("write", self.path, error) from error
        _compare(known, manifest, self.path)
        return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def file(self, name: str) -> Path:
        return self.path / name

    def save(self, name: str, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """A safetensors file with `notes` as its metadata, whole or not at all. Raises FileError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path, aside = self.file(name), self.file(name + ".part")
        try:
            save_file({n: t.contiguous() for n, t in tensors.items()}, aside, metadata=dict(notes))
            publish(aside, path)
        except OSError as error:
            raise failed("write", path, error) from error
        except SafetensorError as error:  # its own text names the system's error: "No space left on device"
            raise FileError(f"cannot write {path}: {error}. Free some space and run the same command again.") from error

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """What `save` saved under `name`, if it is there."""
        path = self.file(name)
        if not path.is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return {n: file.get_tensor(n) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except SafetensorError as error:
            raise WeightsError(f"{path} is damaged ({error}); remove it and run the same command again") from error

    def remove(self) -> None:
        """All of it, once the target is whole."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _known(self) -> dict[str, Any] | None:
        """What the folder says that it is; None for a new one. Raises UsageError for a folder of somebody else."""
        try:
            found = json.loads((self.path / MANIFEST).read_bytes())[_NAMED]
        except FileNotFoundError:
            others = [p.name for p in self.path.iterdir() if p.name not in (LOCK, MANIFEST + ".part")]
            if others:
                raise UsageError(f"{self.path} is in the way: it holds {others[0]} and is no quantization") from None
            return None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.path / MANIFEST} is not ours or is damaged; remove {self.path}") from None
        return dict(found)

    def _costly(self) -> bool:
        """Whether there is work that took time."""
        return any(path.suffix == ".safetensors" and path.name not in CHEAP for path in self.path.iterdir())

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        self._lock = open(self.path / LOCK, "a+b")  # noqa: SIM115 (held until close)
        if not _locked(self._lock):
            self.close()
            raise UsageError(f"{self.target} is being quantized by another process. Wait for it, or give another OUT.")


def check_target(target: Path) -> None:
    """Raises UsageError for anything but an empty folder, or nothing, at `target`."""
    if target.is_dir():
        if any(target.iterdir()):
            raise UsageError(f"{target} exists and is not empty; give another OUT, or remove it first")
    elif target.exists():
        raise UsageError(f"{target} is a file; OUT must be a folder that does not exist yet")
    elif not target.parent.is_dir():
        raise UsageError(f"the folder {target.parent} for {target.name} does not exist; create it first")


def publish(aside: Path, path: Path) -> None:
    """Gives a written file its name once all of it is on the disk."""
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    publish(aside, path)


def failed(action: str, path: Path, error: OSError) -> FileError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space and run the same command again." if full else "Check the path and its permissions."
    return FileError(f"cannot {action} {path}: {error.strerror or error}. {remedy}")


def _compare(known: Mapping[str, Any], manifest: Mapping[str, Any], path: Path) -> None:
    wanted = _plain(manifest)
    keys = [key for key in {**wanted, **known} if known.get(key) != wanted.get(key)]
    changed = [f"{key} was {known.get(key)!r}, is {wanted.get(key)!r}" for key in keys]
    if changed:
        raise UsageError(
            f"{path} holds unfinished work of other settings ({'; '.join(changed)}). Give the same ones to go on, "
            "--no-resume to start over, or another OUT."
        )


def _plain(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    return found


def _locked(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: no second process is expected there
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    return True
