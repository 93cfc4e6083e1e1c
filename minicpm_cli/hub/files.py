"""What lies on this disk: is it a model, and is it whole? Answers name the missing files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.errors import ConfigError, FileError, ModelError, ModelNotFound, WeightsError

Progress = Callable[[str, int, int | None], None]  # (what, bytes done, bytes in all if known)

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is a directory or a .gguf file; `revision` the commit hash of a hub model, None for local files."""

    name: str
    path: Path
    revision: str | None = None


def check_path(path: Path) -> Path:
    """`path` if it is a model that can be tried: a .gguf file, or a directory with a config and whole weights."""
    if path.is_file():
        return _check_file(path)
    missing = missing_files(path)
    if not missing:
        return path
    part = sorted(p.name for p in path.glob("*.part")) + sorted(p.name for p in path.glob("*.incomplete"))
    torn = f" There is {part[0]}: an unfinished copy or quantization; finish it." if part else ""
    kind = ModelNotFound if missing[0] == "config.json" else WeightsError
    raise kind(f"{path} is not a complete model: missing {', '.join(missing)}.{torn}{_hint(path, missing)}")


def _check_file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(
            f"{path} is not a model: a file must be a .gguf. "
            "For safetensors give the folder that also holds config.json."
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise WeightsError(
                f"{path} does not begin with GGUF: torn, or not a GGUF file ({path.stat().st_size} bytes)"
            )
    return path


def _hint(path: Path, missing: list[str]) -> str:
    if not any(path.iterdir()):
        return " The folder is empty."
    gguf = sorted(p.name for p in path.glob("*.gguf"))
    if gguf and missing[0] == "config.json":
        return f" It holds GGUF files: name one, such as {path / gguf[0]}."
    if missing[0] == "config.json" and (path / "adapter_config.json").exists():
        return f" It is a LoRA adapter: give the base model with -m and --lora {path}."
    return ""


def missing_files(path: Path) -> list[str]:
    """Names of the files that a model directory still needs, config.json first; empty when it is whole."""
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    missing += missing_weights(path)
    if not any((path / name).is_file() for name in TOKENIZERS):
        missing.append(" or ".join(TOKENIZERS))
    return missing


def missing_weights(path: Path) -> list[str]:
    """Weights that are absent or empty: each shard of an index, or the one file that was never there.

    The order is the loader's: safetensors before .bin, one file before shards.
    """
    for single, loose in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        if _filled(path / single):
            return []
        if (path / f"{single}.index.json").is_file():
            return [name for name in shards(path / f"{single}.index.json") if not _filled(path / name)]
        if any(_filled(p) for p in path.glob(loose) if not p.name.startswith("adapter")):
            return _numbered_gaps(path)
    return ["model.safetensors (or pytorch_model.bin, or shards with an index)"]


def shards(index: Path) -> list[str]:
    """The files that an index names, each once."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map: torn or not an index. Fetch it again.")
    return sorted({str(name) for name in weight_map.values()})


def read_json(path: Path, error: type[ModelError] = ConfigError, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a file, {} when it is absent and not required. Raises `error`."""
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read as JSON: {cause}. Fetch it again.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds {type(value).__name__}, not a JSON object. Fetch it again.")
    return value


def _numbered_gaps(path: Path) -> list[str]:
    """Shards named -00001-of-00003 without an index: the ones that are absent, and the index itself."""
    for first in sorted(path.glob("*-of-*.safetensors")) + sorted(path.glob("pytorch_model-*-of-*.bin")):
        stem, _, count = first.stem.rpartition("-of-")
        if not count.isdigit() or int(count) < 2:
            continue
        prefix = stem.rpartition("-")[0]
        wanted = [f"{prefix}-{i:05d}-of-{count}{first.suffix}" for i in range(1, int(count) + 1)]
        index = f"{prefix}{first.suffix}.index.json"
        return [index] + [name for name in wanted if not _filled(path / name)]
    return []


def _filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def sha256(path: Path, report: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file, read a MiB at a time; `report` is told the bytes done."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if report:
                report(done)
    return digest.hexdigest()


def need_space(folder: Path, needed: int, what: str) -> None:
    """FileError when the disk under `folder` cannot take `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FileError(
            f"{what} needs {size_text(needed)} in {folder}, where {size_text(free)} are free. "
            "Free some space, or point MINICPM_CACHE_DIR (demo) or HF_HOME (hub models) at another disk."
        )


def size_text(count: float) -> str:
    """Bytes for people: 98.4 MB, 5.0 GB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
