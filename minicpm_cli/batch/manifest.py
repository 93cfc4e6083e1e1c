"""OUT.manifest.json: what the rows of OUT were made with, so that a resume never mixes two runs in one file."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minicpm_cli import __version__
from minicpm_cli.batch.files import failed, write_json
from minicpm_cli.batch.scan import Scan
from minicpm_cli.errors import UsageError

_FORMAT = 1
_SHOWN = 3  # of a model's changed files
_LONG = 90  # characters of a value
_REMEDY = "Use the old settings, give another OUT, start again with --overwrite, or go on all the same with --force."


@dataclass(frozen=True, slots=True)
class Manifest:
    """`model`, `files`, `parameters` and `shard` must not change between runs; `input` may only grow.

    `input` holds bytes and sha256 of the input file; it is empty for a stream. `files` says which model the name stood
    for; it is empty until one has been opened, and in manifests of programs that did not record it. What is not known
    is not compared: such a run goes on, and the model it goes on with is recorded.
    """

    model: Mapping[str, Any]
    parameters: Mapping[str, Any]
    shard: str | None
    seed: int
    input: Mapping[str, Any]
    version: str = __version__
    format: int = _FORMAT
    files: Mapping[str, Any] = field(default_factory=dict)

    @property
    def input_bytes(self) -> int | None:
        size = self.input.get("bytes")
        return size if isinstance(size, int) else None

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def manifest_path(out: Path) -> Path:
    return out.with_name(out.name + ".manifest.json")


def read_manifest(path: Path) -> Manifest | None:
    """None when there is none. Raises UsageError for a file that is no manifest of ours."""
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']!r}, expected {_FORMAT}")
        return _of_its_types(Manifest(**raw))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise failed("read", path, e) from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UsageError(
            f"{path} cannot be read as a manifest ({e}). Remove it and give --force to go on, or --overwrite."
        ) from e


def _of_its_types(found: Manifest) -> Manifest:
    """A file that somebody has edited. Raises ValueError."""
    for name in ("model", "parameters", "input", "files"):
        if not isinstance(getattr(found, name), dict):
            raise ValueError(f"{name} is no object")
    if type(found.seed) is not int or not 0 <= found.seed < 2**64:
        raise ValueError(f"the seed is {found.seed!r}")
    return found


def new_seed() -> int:
    """32 bits: easy to type again."""
    return secrets.randbits(32)


def fingerprint(scan: Scan | None) -> dict[str, Any]:
    return {} if scan is None else {"bytes": scan.size, "sha256": scan.sha256, "rows": scan.rows}


def refuse_another_model(old: Manifest, new: Manifest, out: Path) -> None:
    """The check that is left when a model has been opened. Raises UsageError."""
    _refuse(list(_other_files(old, new)), out)


def refuse_changes(old: Manifest, new: Manifest, scan: Scan | None, out: Path) -> None:
    """Raises UsageError that names everything that differs."""
    _refuse([*_differences(old, new), *_input_change(old, scan)], out)


def _refuse(changes: list[str], out: Path) -> None:
    if changes:
        raise UsageError(f"{out} was begun with other settings: {'; '.join(changes)}. {_REMEDY}")


def _differences(old: Manifest, new: Manifest) -> Iterator[str]:
    for name in ("model", "parameters"):
        yield from _changed_keys(name, getattr(old, name), getattr(new, name))
    yield from _other_files(old, new)
    for name in ("shard", "seed"):
        if getattr(old, name) != getattr(new, name):
            yield _changed(name, getattr(old, name), getattr(new, name))


def _other_files(old: Manifest, new: Manifest) -> Iterator[str]:
    """Another name's files are another's anyway, and no news."""
    if not (old.files and new.files) or old.model.get("model") != new.model.get("model"):
        return
    changed = [key for key in sorted({*old.files, *new.files}) if old.files.get(key) != new.files.get(key)]
    for key in changed[:_SHOWN]:
        yield _changed(f"the model's {key}", old.files.get(key), new.files.get(key))
    if len(changed) > _SHOWN:
        yield f"{len(changed) - _SHOWN} more of the model's files are others"


def _changed_keys(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield _changed(f"{name}.{key}", before.get(key), after.get(key))


def _changed(name: str, before: Any, after: Any) -> str:
    old, new = json.dumps(before, ensure_ascii=False), json.dumps(after, ensure_ascii=False)
    place = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"{name} was {_around(old, place)} and is {_around(new, place)}"


def _around(text: str, place: int) -> str:
    """Enough of a long text to see what is at `place`."""
    if len(text) <= _LONG:
        return text
    start = max(place - _LONG // 3, 0)
    piece = text[start : start + _LONG]
    return ("..." if start else "") + piece + ("..." if start + _LONG < len(text) else "")


def _input_change(old: Manifest, scan: Scan | None) -> Iterator[str]:
    before = old.input_bytes
    if (before is None) != (scan is None):
        kinds = ("a stream", "a file") if before is None else ("a file", "a stream")
        yield f"the input was {kinds[0]} and is {kinds[1]}"
    elif before is not None and scan is not None:
        yield from _file_change(old, before, scan)


def _file_change(old: Manifest, before: int, scan: Scan) -> Iterator[str]:
    if scan.size < before:
        yield f"the input had {before} bytes and has {scan.size}"
    elif scan.prefix_sha256 != old.input.get("sha256"):
        yield f"the input's first {before} bytes are no longer the same"
    elif scan.split_line is not None:
        yield f"line {scan.split_line} of the input, then its unfinished last one, has been continued"
