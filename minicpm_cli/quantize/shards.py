"""Finished parts joined into the files that other programs expect: bytes are copied, nothing is loaded."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minicpm_cli.model.safetensors_source import BITS, Entry, read_entries
from minicpm_cli.quantize.folder import failed, publish, write_json

SHARD_BYTES = 4 << 30
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    entries: tuple[tuple[str, Entry], ...]


def join(parts: Sequence[Path], folder: Path, limit: int = SHARD_BYTES) -> list[str]:
    """Writes the tensors of `parts` to files in `folder` and returns the names, the index's among them.

    A file that is there already is whole and stays. Raises FileError.
    """
    entries = [pair for part in parts for pair in read_entries(part).items()]
    shards = split(entries, limit)
    for shard in shards:
        if not (folder / shard.name).exists():
            _write(folder / shard.name, shard)
    if len(shards) == 1:
        return [SINGLE]
    total = sum(entry.end - entry.begin for _, entry in entries)
    weight_map = {name: shard.name for shard in shards for name, _ in shard.entries}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return [*(shard.name for shard in shards), INDEX]


def split(entries: Sequence[tuple[str, Entry]], limit: int) -> list[Shard]:
    """In the given order, each shard as full as `limit` bytes allow."""
    runs: list[list[tuple[str, Entry]]] = [[]]
    size = 0
    for name, entry in entries:
        nbytes = entry.end - entry.begin
        if runs[-1] and size + nbytes > limit:
            runs.append([])
            size = 0
        runs[-1].append((name, entry))
        size += nbytes
    if len(runs) == 1:
        return [Shard(SINGLE, tuple(runs[0]))]
    stem = SINGLE.removesuffix(".safetensors")
    return [Shard(f"{stem}-{i:05d}-of-{len(runs):05d}.safetensors", tuple(run)) for i, run in enumerate(runs, 1)]


def _write(path: Path, shard: Shard) -> None:
    aside = path.with_name(path.name + ".part")
    # Wider elements first, as the safetensors library orders them, so that every tensor is aligned when mapped.
    ordered = sorted(shard.entries, key=lambda pair: (-BITS[pair[1].dtype], pair[0]))
    try:
        with open(aside, "wb") as file:
            file.write(_header(ordered))
            for _, entry in ordered:
                file.writelines(_bytes(entry))
        publish(aside, path)
    except OSError as error:
        raise failed("write", path, error) from error


def _header(ordered: Sequence[tuple[str, Entry]]) -> bytes:
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, entry in ordered:
        size = entry.end - entry.begin
        rows[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(entry: Entry) -> Iterator[bytes]:
    """The tensor's bytes; offsets of an entry count from the end of its file's header."""
    with open(entry.file, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + length + entry.begin, os.SEEK_SET)
        left = entry.end - entry.begin
        while left:
            chunk = file.read(min(_CHUNK, left))
            left -= len(chunk)
            yield chunk
