"""From the name that a user types to the files of a model: a path, an alias, the demo, or a hub repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minicpm_cli.disk import path_of
from minicpm_cli.errors import ModelError, ModelNotFound, WeightsError
from minicpm_cli.hub import cache, catalog, demo
from minicpm_cli.hub.catalog import CATALOG, CatalogEntry
from minicpm_cli.hub.contents import NotAModel, RepoName
from minicpm_cli.hub.files import ModelFiles, Progress, check_path, sha256
from minicpm_cli.hub.identity import identity
from minicpm_cli.settings import Settings

__all__ = [
    "CATALOG",
    "CatalogEntry",
    "Listed",
    "ModelFiles",
    "adapter",
    "headers",
    "identify",
    "list_models",
    "pull",
    "resolve",
]


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of `minicpm models`: `path` is where the whole model is on this disk, `stored` what is there in bytes.

    `missing` names the files of a copy that is not whole.
    """

    entry: CatalogEntry
    path: Path | None = None
    stored: int = 0
    missing: tuple[str, ...] = ()


def resolve(name: str, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """The files of the model called `name`; fetches what is not here.

    A path comes first, then an alias, then a repository id. Raises ModelNotFound, WeightsError or FileError.
    """
    return _resolve(name, settings, progress or _silent, refresh=False)


def pull(name: str, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """`resolve`, newest version first, and every byte of the weights is read again: is it what was published?

    An adapter is fetched as well.
    """
    report = progress or _silent
    try:
        files = _resolve(name, settings, report, refresh=True)
    except NotAModel:
        files = _adapter(RepoName.parse(name), report, refresh=True)
    if files.path == demo.path_in(settings.cache_dir):
        demo.verify(settings.cache_dir, report)
    elif files.revision is not None:
        _verify_blobs(files.path, report)
    return files


def adapter(name: str, progress: Progress | None = None) -> Path:
    """The folder of a LoRA adapter, by its path or its repository id; fetches what is not here. Raises as `resolve`."""
    path = path_of(name)
    named = None if path.is_dir() else RepoName.parse(name)
    if named is None or named.file is not None:
        return path
    return _adapter(named, progress or _silent, refresh=False).path


@contextmanager
def headers(name: str, settings: Settings, progress: Progress | None = None) -> Iterator[tuple[ModelFiles, int]]:
    """What tells a model's sizes, and the bytes that are still to be fetched: files that are whole only if it is here.

    Of a hub model nothing is fetched but configs and headers. Raises as `resolve`.
    """
    present = _present(name, settings)
    repository = None if present else _repository(name)
    if present is not None or repository is None:
        yield present or resolve(name, settings, progress), 0
        return
    from minicpm_cli.hub import remote

    (progress or _silent)(f"looking up {repository.repo}", 0, None)
    with remote.outline(repository) as found:
        yield replace(found.files, name=name), found.nbytes


def identify(name: str, settings: Settings) -> dict[str, Any]:
    """Which model `name` stands for now, as JSON values; empty while that is not known because files are missing.

    No network and no weights: a hub model is known by its commit, local files by their sizes and times.
    """
    try:
        files = _present(name, settings)
        return {} if files is None else identity(files, settings.cache_dir)
    except (ModelError, OSError):
        return {}  # opening the model says what is wrong


def list_models(settings: Settings) -> list[Listed]:
    """The catalogue, and what of it is on this disk."""
    return [_listed(entry, settings) for entry in CATALOG]


def _resolve(name: str, settings: Settings, report: Progress, *, refresh: bool) -> ModelFiles:
    path = path_of(name)
    entry = catalog.find(name)
    if _is_path(path, entry):
        return ModelFiles(name, check_path(path))
    if entry is not None and entry.repo is None:
        return ModelFiles(name, demo.fetch(settings.cache_dir, report))
    repository = _repository(name)
    if repository is None:
        raise ModelNotFound(_unknown(name))
    from minicpm_cli.hub import repo

    return replace(repo.fetch(repository, report, refresh=refresh), name=name)


def _adapter(name: RepoName | None, report: Progress, *, refresh: bool) -> ModelFiles:
    from minicpm_cli.hub import repo

    assert name is not None, "what was looked into has a name"
    return repo.fetch(replace(name, adapter=True), report, refresh=refresh)


def _present(name: str, settings: Settings) -> ModelFiles | None:
    """What `resolve` would give without fetching anything."""
    path = path_of(name)
    entry = catalog.find(name)
    if _is_path(path, entry):
        return ModelFiles(name, check_path(path))
    if entry is not None and entry.repo is None:
        found = demo.cached(settings.cache_dir)
        return None if found is None else ModelFiles(name, found)
    repository = _repository(name)
    folder = None if repository is None else cache.whole(repository)
    return None if folder is None else ModelFiles(name, folder, folder.name)


def _repository(name: str) -> RepoName | None:
    """Of an alias or a repository id; None for what is neither."""
    entry = catalog.find(name)
    if entry is not None and entry.repo is None:
        return None
    return RepoName.parse(name if entry is None else str(entry.repo))


def _is_path(path: Path, entry: CatalogEntry | None) -> bool:
    """A folder that happens to be called "demo" is the demo only if it is a model."""
    return path.exists() and (entry is None or (path / "config.json").is_file())


def _listed(entry: CatalogEntry, settings: Settings) -> Listed:
    if entry.repo is None:
        path = demo.cached(settings.cache_dir)
        return Listed(entry, path, path.stat().st_size if path else 0)
    name = RepoName(entry.repo, entry.repo)
    folder = cache.snapshot(name)
    if folder is None:
        return Listed(entry)
    try:
        missing = tuple(cache.absent(name, folder))
    except ModelError as error:  # a torn index, say
        missing = (str(error),)
    return Listed(entry, None if missing else folder, cache.stored_bytes(entry.repo), missing)


def _verify_blobs(path: Path, progress: Progress) -> None:
    """The hub's cache names large files by their SHA-256; a file that is no such link is left alone."""
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


def _unknown(name: str) -> str:
    near = catalog.nearest(name)
    meant = f" Did you mean {near}?" if near else ""
    return (
        f"there is no model {name!r}: no such file or folder, no alias, and no repository id (owner/name).{meant} "
        "minicpm models lists the aliases."
    )


def _silent(what: str, done: int, total: int | None) -> None:
    pass
