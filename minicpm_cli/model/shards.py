"""Which files of a folder hold the weights, and what the index of a sharded checkpoint promises of them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from minicpm_cli.errors import WeightsError

GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one checkpoint. `index` (tensor name -> file) is None where the files speak for themselves."""

    folder: Path
    files: tuple[Path, ...]
    index: dict[str, Path] | None = None

    def check(self, file: Path, names: set[str]) -> None:
        """Compares what a shard holds with what the index promises of it."""
        if self.index is None:
            return
        absent = sorted(n for n, f in self.index.items() if f == file and n not in names)
        if absent:
            raise WeightsError(
                f"{file} lacks {len(absent)} tensors that the index promises, first {absent[0]}; fetch it again"
            )
        stray = sorted(n for n in names if self.index.get(n) != file)
        if stray:
            other = self.index.get(stray[0])
            where = f"the index places it in {other.name}" if other else "the index does not list it"
            raise WeightsError(f"{file} holds tensor {stray[0]} but {where}: the shards are of different checkpoints")


def safetensors_files(folder: Path) -> Shards | None:
    return _find(folder, "model.safetensors", "*.safetensors")


def bin_files(folder: Path) -> Shards | None:
    return _find(folder, "pytorch_model.bin", "pytorch_model*.bin")


def unreadable(path: Path, why: str) -> WeightsError:
    """A damaged file, with the one cause that is easy to name: a git clone without git-lfs."""
    with suppress(OSError), open(path, "rb") as file:  # the file may be elsewhere
        if file.read(len(GIT_LFS)) == GIT_LFS:
            return WeightsError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")
    return WeightsError(f"{path}: {why}. The file is damaged or incomplete; fetch it again.")


def _find(folder: Path, single: str, pattern: str) -> Shards | None:
    if (folder / single).exists():
        return Shards(folder, (folder / single,))
    index = folder / f"{single}.index.json"
    if index.exists():
        return _indexed(folder, index)
    loose = sorted(f for f in folder.glob(pattern) if not f.name.startswith("adapter"))
    return Shards(folder, tuple(loose)) if loose else None


def _indexed(folder: Path, index: Path) -> Shards:
    names = _weight_map(index)
    files = {shard: _shard(folder, index, shard) for shard in sorted(set(names.values()))}
    missing = [shard for shard, file in files.items() if not file.is_file()]
    if missing:
        raise WeightsError(
            f"{index} names {len(files)} files, {len(missing)} of them are not there, first {missing[0]}; fetch them"
        )
    return Shards(folder, tuple(files.values()), {name: files[shard] for name, shard in names.items()})


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw: Any = json.loads(index.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise unreadable(index, f"not readable as JSON ({error})") from error
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(v, str) and v for v in names.values()):
        raise unreadable(index, "has no weight_map from tensor names to files")
    return names


def _shard(folder: Path, index: Path, name: str) -> Path:
    """The path of a shard, which must not leave the folder.

    The hub's cache is the exception that it makes itself: snapshots/<revision>/ links into blobs/ of the same model.
    """
    path = folder / name
    root = folder.resolve()
    home = root.parent.parent if root.parent.name == "snapshots" else root
    written = PureWindowsPath(name)  # splits at both kinds of slash
    if written.is_absolute() or written.drive or name.startswith("/") or ".." in written.parts:
        raise WeightsError(f"{index} names the file {name!r}, which is outside its folder; refusing to read it")
    if not path.resolve().is_relative_to(home):
        raise WeightsError(
            f"{index} names {name!r}, a link out of its folder to {path.resolve()}; refusing to follow it. "
            "Put the file itself there."
        )
    return path
