"""Hub repositories through huggingface_hub: only the files that a model needs, checked against what the hub says."""

from __future__ import annotations

import errno
import glob
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicpm_cli.errors import FileError, MinicpmError, ModelNotFound, WeightsError
from minicpm_cli.hub import cache
from minicpm_cli.hub.contents import RepoName
from minicpm_cli.hub.files import ModelFiles, Progress, need_space

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo


def fetch(name: RepoName, progress: Progress, *, refresh: bool = False) -> ModelFiles:
    """The files of a repository, in the hub's own cache.

    A copy that is whole is used as it is, so that a model changes only when `refresh` asks the hub for a newer one.
    With HF_HUB_OFFLINE, or without a network, that copy must be here. Raises ModelNotFound, WeightsError or FileError.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(name, "HF_HUB_OFFLINE is set")
    if not refresh and (folder := cache.whole(name)) is not None:
        return _files(name, folder)
    try:
        return _download(name, progress)
    except MinicpmError:
        raise
    except Exception as error:
        if not isinstance(error, expected()):
            raise
        return after(error, name)


def _download(name: RepoName, progress: Progress) -> ModelFiles:
    from huggingface_hub import HfApi, snapshot_download

    progress(f"looking up {name.repo}", 0, None)
    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {s.rfilename: s.size for s in info.siblings or []}
    wanted = name.wanted(sizes)
    missing = _missing_bytes(name.repo, info, wanted)
    need_space(_existing(cache.root()), missing, name.repo)
    folder = snapshot_download(
        name.repo,
        revision=name.revision,
        allow_patterns=[glob.escape(n) for n in wanted],
        tqdm_class=_bar(f"fetching {name.repo}", missing, progress),
    )
    return _checked(name, Path(folder), {n: sizes[n] for n in wanted} if Path(folder).name == info.sha else {})


def _checked(name: RepoName, folder: Path, sizes: dict[str, int | None]) -> ModelFiles:
    """What was fetched, compared with what the hub says of it and with what the index promises."""
    for file, size in sizes.items():
        path = folder / file
        actual = path.stat().st_size if path.exists() else None
        if actual is None or (size is not None and actual != size):
            raise WeightsError(
                f"{name.repo}: {file} is {'missing' if actual is None else f'{actual} bytes'} after the download, "
                f"the hub says {size} bytes. Delete {path.resolve()} and pull again."
            )
    if missing := cache.absent(name, folder):
        raise WeightsError(
            f"{name.repo} is not complete on the hub itself: {', '.join(missing)} cannot be fetched. "
            "Take another revision (owner/name@revision) or another model."
        )
    return _files(name, folder)


def _files(name: RepoName, folder: Path) -> ModelFiles:
    return ModelFiles(name.text, folder / name.file if name.file else folder, folder.name)


def _missing_bytes(repo: str, info: ModelInfo, wanted: list[str]) -> int:
    """What is still to come. The cache keeps a file under its SHA-256, or its git hash when it is small."""
    blobs = cache.folder_of(repo) / "blobs"
    chosen = [s for s in info.siblings or [] if s.rfilename in wanted]
    hashes = {s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id for s in chosen}
    return sum(s.size or 0 for s in chosen if not (blobs / str(hashes[s.rfilename])).exists())


def _existing(folder: Path) -> Path:
    return next(p for p in (folder, *folder.parents) if p.exists())


def _bar(what: str, total: int, progress: Progress) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and tells `progress` the bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self.bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.bytes and total:
                progress(what, min(int(self.n), total), total)
            return None

    if total:
        progress(what, 0, total)
    return Bar


def _from_cache(name: RepoName, why: str) -> ModelFiles:
    """The snapshot that is here already, if it is whole; otherwise an error that names each missing file."""
    folder = cache.snapshot(name)
    again = f"Fetch it with a network: minicpm pull {name.text}"
    if folder is None:
        raise ModelNotFound(f"{name.text} is not in the cache ({cache.root()}), and {why}. {again}")
    if missing := cache.absent(name, folder):
        raise ModelNotFound(
            f"{name.text} is in the cache ({folder}) but incomplete, and {why}. Missing: {', '.join(missing)}. {again}"
        )
    return _files(name, folder)


def expected() -> tuple[type[BaseException], ...]:
    """What may go wrong between here and the hub; anything else is a defect and keeps its traceback."""
    from huggingface_hub import errors

    http = errors.HfHubHTTPError.__bases__  # the HTTP client's own base class, which differs between versions
    xet = (errors.XetDownloadError,) if hasattr(errors, "XetDownloadError") else ()
    return (OSError, errors.EntryNotFoundError, errors.HFValidationError, *http, *xet)


def after(error: Exception, name: RepoName) -> ModelFiles:
    """The cache where the network failed; an error of the hub or of the disk by its own name."""
    from huggingface_hub import errors

    causes: tuple[tuple[type[Exception], Callable[[], MinicpmError]], ...] = (
        (errors.GatedRepoError, lambda: ModelNotFound(_gated(name))),
        (errors.RepositoryNotFoundError, lambda: ModelNotFound(_no_repository(name))),
        (errors.RevisionNotFoundError, lambda: ModelNotFound(f"{name.repo} has no revision {name.revision!r}")),
        (errors.HFValidationError, lambda: ModelNotFound(f"{name.text!r} is no repository id: {error}")),
    )
    for kind, known in causes:
        if isinstance(error, kind):
            raise known() from error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise FileError(
            f"the disk is full while fetching {name.repo} into {cache.root()}; "
            "free some space or point HF_HOME at another disk"
        ) from error
    if "Consistency check failed" in str(error):
        raise WeightsError(
            f"{name.repo}: what came is not what the hub announced ({_short(error)}). Try again."
        ) from error
    try:
        return _from_cache(name, _why(error))
    except ModelNotFound as failed:
        raise failed from error


def _why(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the hub refuses access (HTTP {status}: check HF_TOKEN)"
    if status == 429:
        return "the hub refuses more requests for now (HTTP 429: wait, or set HF_TOKEN)"
    return f"the hub cannot be reached or broke off ({_short(error)})"


def _gated(name: RepoName) -> str:
    from huggingface_hub import constants

    return f"{name.repo} is gated: accept its terms at {constants.ENDPOINT}/{name.repo}, then set HF_TOKEN."


def _no_repository(name: RepoName) -> str:
    from huggingface_hub import constants

    return (
        f"{name.repo} does not exist at {constants.ENDPOINT}, or is private (then set HF_TOKEN); "
        "and there is no such folder here. minicpm models lists the aliases."
    )


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
