"""Which model a name stands for at this moment, told by its files and without reading them: no network, no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minicpm_cli.hub import demo
from minicpm_cli.hub.files import ModelFiles

# What decides an answer: weights, config, tokenizer and template, but no README, code or image beside them.
_DECISIVE = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model")


def identity(files: ModelFiles, cache: Path) -> dict[str, Any]:
    """JSON values that change when the model does: the commit of a hub model, else each file's size and time.

    `cache` is where the demo model lies; that one has a checksum.
    """
    if files.revision is not None:
        return {"revision": files.revision}
    if files.path == demo.path_in(cache):
        return {"sha256": demo.GGUF_SHA256}
    path = files.path.resolve()
    found = sorted(p for p in path.iterdir() if p.suffix in _DECISIVE and p.is_file()) if path.is_dir() else [path]
    return {"path": str(path)} | {p.name: written(p) for p in found}


def written(path: Path) -> dict[str, int]:
    """The size in bytes and the time of the last write."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
