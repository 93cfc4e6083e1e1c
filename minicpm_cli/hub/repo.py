"""Hub repositories through huggingface_hub: only the files that a model needs, checked against what the hub says."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minicpm_cli.errors import FileError, MinicpmError, ModelNotFound, WeightsError
from minicpm_cli.hub.files import ModelFiles, Progress, missing_files, size_text

# "name/name", with an optional file of that repository and an optional revision.
REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>\S+))?")
CONFIGS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template*",)
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def fetch(name: str, progress: Progress) -> ModelFiles:
    """The files of a repository in the hub's own cache, fetched where they are missing or stale.

    Without a network (or with HF_HUB_OFFLINE) the cache must hold all of them. Raises ModelNotFound, WeightsError or
    FileError.
    """
    from huggingface_hub import constants

    match = REPO.fullmatch(name)
    if match is None:
        raise ModelNotFound(
            f"{name!r} is no repository id; write owner/name, owner/name@revision or owner/name/file.gguf"
        )
    repo, file, revision = match["repo"], match["file"], match["revision"]
    if constants.HF_HUB_OFFLINE:
        return _cached(name, repo, file, revision, "HF_HUB_OFFLINE is set")
    try:
        return _online(name, repo, file, revision, progress)
    except MinicpmError:
        raise
    except Exception as error:  # noqa: BLE001 - errors of the hub's, the network's and the system's libraries
        return _recovered(name, repo, file, revision, error)


def _online(name: str, repo: str, file: str | None, revision: str | None, progress: Progress) -> ModelFiles:
    from huggingface_hub import HfApi, snapshot_download

    progress(f"looking up {repo}", 0, None)
    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes = {s.rfilename: s.size for s in info.siblings or []}
    wanted = [file] if file else wanted_files(repo, list(sizes))
    if file and file not in sizes:
        raise ModelNotFound(f"{repo} has no file {file}; its GGUF files: {_ggufs(list(sizes))}")
    total = sum(sizes[f] or 0 for f in wanted)
    progress(f"fetching {repo} ({size_text(total)})", 0, None)
    folder = Path(snapshot_download(repo, revision=info.sha, allow_patterns=wanted))
    _check_sizes(repo, folder, {f: sizes[f] for f in wanted})
    return ModelFiles(name, folder / file if file else folder, info.sha)


def wanted_files(repo: str, names: list[str]) -> list[str]:
    """What a model needs of a repository: never code, and .bin weights only where there are no safetensors."""
    top = [n for n in names if "/" not in n and not n.endswith(".py")]

    def of(patterns: tuple[str, ...]) -> list[str]:
        return [n for n in top if any(fnmatch(n, p) for p in patterns)]

    weights = of(SAFETENSORS) or of(BIN)
    if not any(n.endswith((".safetensors", ".bin")) for n in weights):
        if ggufs := _ggufs(names):
            raise ModelNotFound(
                f"{repo} holds GGUF files: name one, such as {repo}/{ggufs.split(', ')[0]}. All: {ggufs}"
            )
        raise ModelNotFound(f"{repo} holds no weights (no .safetensors, pytorch_model*.bin or .gguf file)")
    if "config.json" not in top:
        raise ModelNotFound(f"{repo} has weights but no config.json; it is not a complete model")
    return of(CONFIGS + TEMPLATES) + weights


def _ggufs(names: list[str]) -> str:
    return ", ".join(n for n in names if n.endswith(".gguf"))


def _check_sizes(repo: str, folder: Path, sizes: dict[str, int | None]) -> None:
    for name, size in sizes.items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual is None or (size is not None and actual != size):
            raise WeightsError(
                f"{repo}: {name} is {'missing' if actual is None else f'{actual} bytes'} after the download, "
                f"the hub says {size} bytes. Delete {path} and pull again."
            )


def _cached(name: str, repo: str, file: str | None, revision: str | None, why: str) -> ModelFiles:
    """The snapshot that is here already, if it is whole."""
    folder = _snapshot(repo, revision)
    if folder is None:
        raise ModelNotFound(f"{repo} is not in the cache, and {why}. Fetch it once with a network: minicpm pull {name}")
    if file is None:
        missing = missing_files(folder)
    else:
        missing = [] if (folder / file).is_file() else [file]
    if missing:
        raise ModelNotFound(
            f"{repo} is in the cache ({folder}) but incomplete, and {why}. Missing: {', '.join(missing)}. "
            f"Fetch them with a network: minicpm pull {name}"
        )
    return ModelFiles(name, folder / file if file else folder, folder.name)


def _snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of the revision in the hub's cache (default: main), whole or not."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    wanted = revision or "main"
    ref = root / "refs" / wanted
    commit = ref.read_text().strip() if ref.is_file() else wanted
    exact = root / "snapshots" / commit
    if exact.is_dir():
        return exact
    # Fetched by its commit alone, as `fetch` does: the newest snapshot stands for main.
    snapshots = sorted((root / "snapshots").glob("*"), key=lambda p: p.stat().st_mtime) if revision is None else []
    return snapshots[-1] if snapshots else None


def _recovered(name: str, repo: str, file: str | None, revision: str | None, error: Exception) -> ModelFiles:
    """The cache where the network failed; an error of the hub or of the disk by its own name."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        raise ModelNotFound(f"{repo} is gated: accept its terms on its page, then set HF_TOKEN or log in.") from error
    if isinstance(error, errors.RepositoryNotFoundError):
        raise ModelNotFound(
            f"{repo} does not exist on the hub, or is private (set HF_TOKEN). minicpm models lists aliases."
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise ModelNotFound(f"{repo} has no revision {revision!r}") from error
    if isinstance(error, OSError) and error.errno == 28:
        raise FileError(
            f"the disk is full while fetching {repo}; free some space or point HF_HOME at another disk"
        ) from error
    why = f"the hub cannot be reached ({_short(error)})"
    return _cached(name, repo, file, revision, why)


def _short(error: Exception) -> str:
    text: Any = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def whole_snapshot(repo: str) -> Path | None:
    """The newest complete copy of a repository in the hub's cache."""
    folder = _snapshot(repo, None)
    return folder if folder is not None and not missing_files(folder) else None
