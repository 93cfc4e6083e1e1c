"""One output of the outputs of shards: checked first, as a row that is missing or doubled is found by nobody later."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from minicpm_cli.batch.files import Lock, failed, forget_aside, replace_file, same_file
from minicpm_cli.batch.journal import read_row, rows_of
from minicpm_cli.batch.keys import key_hash
from minicpm_cli.batch.manifest import Manifest, manifest_path, read_manifest
from minicpm_cli.batch.order import restore_order
from minicpm_cli.errors import FileError, UsageError

_BLOCK = 1 << 20
_AGAIN = "Run its command again, or take what is there with --force."


@dataclass(frozen=True, slots=True)
class Shard:
    """The output of `minicpm batch --shard index/count`; `index` 0 is what a user may call count/count."""

    path: Path
    manifest: Manifest
    index: int
    count: int

    @classmethod
    def of(cls, path: Path) -> Shard:
        """Raises UsageError for a file that is no shard's, FileError for one that cannot be read."""
        if not path.is_file():
            raise FileError(f"{path} is no file: give the outputs of minicpm batch --shard.")
        manifest = read_manifest(manifest_path(path))
        if manifest is None:
            raise UsageError(f"{path} has no {manifest_path(path).name}, so nothing is known of its rows.")
        if manifest.shard is None:
            raise UsageError(f"{path} is the output of a whole input, not of a shard of it.")
        index, count = map(int, manifest.shard.split("/"))
        return cls(path, manifest, index, count)

    @property
    def name(self) -> str:
        return f"{self.index or self.count}/{self.count}"


@dataclass(slots=True)
class Merged:
    """What the output holds; `ordered`: in the order of the input."""

    shards: int
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ordered: bool = False
    missing: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.errors or self.missing else 0

    def lines(self) -> Iterator[str]:
        """For people."""
        failed_rows = self.errors.total()
        yield f"{self.ok + failed_rows} rows of {self.shards} shards: {self.ok} ok, {failed_rows} failed."
        if self.errors:
            yield ", ".join(f"{code}: {count}" for code, count in sorted(self.errors.items()))
        yield from (f"Not there: {text}." for text in self.missing)


def merge(
    target: Path, paths: Sequence[Path], source: Path | None = None, *, force: bool = False, overwrite: bool = False
) -> Merged:
    """Writes `target` whole or not at all: shard after shard, or in the order of the input `source`.

    With `force` shards may be missing or unfinished. Raises UsageError and FileError.
    """
    _check_target(target, [*paths, *([source] if source else [])], overwrite=overwrite)
    with ExitStack() as stack:
        for path in (target, *paths):
            stack.callback(Lock(path).release)
        forget_aside(target)
        shards = sorted((Shard.of(path) for path in paths), key=lambda shard: (shard.index, shard.path))
        _check_alike(shards)
        if source is not None:
            _check_input(source, shards[0])
        merged = Merged(len(shards), missing=_missing(shards))
        if merged.missing and not force:
            raise UsageError(f"Not there: {'; '.join(merged.missing)}. Give --force to merge without.")
        replace_file(target, lambda file: _copy(shards, file, merged, force=force))
        if source is not None:
            restore_order(target, source, shards[0].manifest.input_bytes or 0)
            merged.ordered = True
        _describe(target, shards, complete=not merged.missing)
    return merged


def _check_target(target: Path, others: Sequence[Path], *, overwrite: bool) -> None:
    for path in others:
        if same_file(str(target), str(path)):
            raise UsageError(f"{target} would be written and read at once: give another OUT.")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists. Give another OUT, or replace it with --overwrite.")


def _check_alike(shards: Sequence[Shard]) -> None:
    """All of one input, with one model and one set of parameters, none twice."""
    first = shards[0]
    for before, shard in pairwise(shards):
        if shard.count != first.count:
            raise UsageError(f"{first.path} is one of {first.count} shards, {shard.path} one of {shard.count}.")
        if before.index == shard.index:
            raise UsageError(f"{before.path} and {shard.path} are both shard {shard.name}.")
        for what, ours, theirs in _facts(first, shard):
            if ours != theirs:
                raise UsageError(f"{shard.path} was made with another {what} than {first.path}: {theirs}, not {ours}.")


def _facts(first: Shard, shard: Shard) -> Iterator[tuple[str, Any, Any]]:
    """What must agree."""
    for key in sorted({*first.manifest.model, *shard.manifest.model}):
        yield key, first.manifest.model.get(key), shard.manifest.model.get(key)
    if first.manifest.files and shard.manifest.files:
        yield "model under that name", dict(first.manifest.files), dict(shard.manifest.files)
    for key in sorted({*first.manifest.parameters, *shard.manifest.parameters}):
        yield key, first.manifest.parameters.get(key), shard.manifest.parameters.get(key)
    for key in ("bytes", "sha256"):
        yield f"input ({key})", first.manifest.input.get(key), shard.manifest.input.get(key)


def _check_input(source: Path, shard: Shard) -> None:
    size, known = shard.manifest.input_bytes, shard.manifest.input.get("sha256")
    if size is None:
        raise UsageError(f"{shard.path} was made of a stream, so its rows have no order that {source} could tell.")
    try:
        with open(source, "rb") as file:
            found = _sha256(file, size)
    except OSError as e:
        raise failed("read", source, e) from e
    if found != known:
        raise UsageError(f"{source} is not the input that {shard.path} was made of, or has changed since.")


def _sha256(file: BinaryIO, size: int) -> str:
    digest, left = hashlib.sha256(), size
    while left and (block := file.read(min(_BLOCK, left))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _missing(shards: Sequence[Shard]) -> list[str]:
    count, there = shards[0].count, {shard.index for shard in shards}
    absent = [f"shard {index or count}/{count}" for index in range(count) if index not in there]
    return [*absent, *filter(None, map(_unfinished, shards))]


def _unfinished(shard: Shard) -> str:
    expected, there = shard.manifest.input.get("rows"), sum(1 for _ in rows_of(shard.path))
    if not isinstance(expected, int) or there >= expected:
        return ""
    return f"{expected - there} of the {expected} rows of {shard.path}"


def _copy(shards: Sequence[Shard], file: IO[bytes], merged: Merged, *, force: bool) -> None:
    hashes = array("Q")
    for shard in shards:
        for offset, raw in rows_of(shard.path):
            row = read_row(raw)
            if row is None or not raw.endswith(b"\n"):
                if not force:
                    raise FileError(f"The row at byte {offset} of {shard.path} is torn. {_AGAIN}")
                merged.missing.append(f"the torn row at byte {offset} of {shard.path}")
                continue
            hashes.append(key_hash(row[0]))
            file.write(raw)
            if row[1] is None:
                merged.ok += 1
            else:
                merged.errors[row[1]] += 1
    doubled = len(hashes) - len(np.unique(np.frombuffer(hashes, np.uint64)))
    if doubled:
        raise UsageError(f"{doubled} rows have an id that another row has, too: these are not shards of one run.")


def _describe(target: Path, shards: Sequence[Shard], *, complete: bool) -> None:
    """A manifest, so that `minicpm batch --retry-errors` can go on with the whole; not if it would promise too much."""
    manifests = [shard.manifest for shard in shards]
    first = manifests[0]
    if not complete or len({manifest.seed for manifest in manifests}) > 1:
        manifest_path(target).unlink(missing_ok=True)
        return
    rows = sum(manifest.input.get("rows", 0) for manifest in manifests)
    replace(first, shard=None, input={**first.input, "rows": rows}).write(manifest_path(target))
