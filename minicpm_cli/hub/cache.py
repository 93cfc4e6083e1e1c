"""The hub's cache on this disk: which snapshot a revision means, and what it still lacks. No network.

The layout is huggingface_hub's own and documented by it; its Python is not imported, which would take half a second.
"""

from __future__ import annotations

import json
from pathlib import Path

from minicpm_cli.hub.contents import RepoName
from minicpm_cli.hub.files import missing_files


def root() -> Path:
    """The folder that HF_HUB_CACHE and HF_HOME speak of."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folder_of(repo: str) -> Path:
    return root() / f"models--{repo.replace('/', '--')}"


def snapshot(name: RepoName) -> Path | None:
    """The folder of that revision (main unless one is named), whole or not; None when it was never fetched."""
    wanted = name.revision or "main"
    folder = folder_of(name.repo)
    ref = folder / "refs" / wanted
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def absent(name: RepoName, folder: Path) -> list[str]:
    """The files that a snapshot lacks, by the hub's own listing where that was kept, else by the weights' index."""
    listing = _listing(folder)
    if name.file is not None:
        return [] if _whole(folder / name.file, listing.get(name.file)) else [name.file]
    if name.adapter:
        there = listing or {path.name: 0 for path in folder.iterdir()}
        return [n for n in name.wanted(there) if not _whole(folder / n, listing.get(n))]
    known = [n for n in name.wanted(listing) if not _whole(folder / n, listing[n])] if listing else []
    return known + [n for n in missing_files(folder) if not set(known) & set(n.split())]  # "a or b" may be one of them


def whole(name: RepoName) -> Path | None:
    """The snapshot's folder when nothing is missing in it."""
    folder = snapshot(name)
    return None if folder is None or absent(name, folder) else folder


def stored_bytes(repo: str) -> int:
    """What a repository takes on this disk, all its revisions together."""
    return sum(p.stat().st_size for p in (folder_of(repo) / "blobs").glob("*") if p.is_file())


def _whole(path: Path, size: int | None) -> bool:
    return path.is_file() and (size is None or path.stat().st_size == size)


def _listing(folder: Path) -> dict[str, int]:
    """File name -> bytes, as the hub listed this commit when it was fetched; empty when that is not known."""
    path = folder.parent.parent / "trees" / f"{folder.name}.json"
    try:
        return {name: int(entry["size"]) for name, entry in json.loads(path.read_bytes())["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
