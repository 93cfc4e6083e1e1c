"""The finished folder: put together aside, moved file by file, config.json last, so that half of one is no model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minicpm_cli.disk import sync_folder
from minicpm_cli.quantize.companions import CONFIG, write_companions
from minicpm_cli.quantize.folder import WorkFolder, failed, write_json
from minicpm_cli.quantize.shards import join

READY, ASIDE, GPTQ_CONFIG = "ready.json", "finished", "quantize_config.json"


def assemble(
    work: WorkFolder,
    source: Path,
    parts: Sequence[str],
    config: Mapping[str, Any],
    report: Callable[[int], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Everything that the folder will hold, complete and synced in the work folder; then READY says so.

    `report` is given the bytes of the weights' files; what it makes of them is returned.
    """
    aside = work.file(ASIDE)
    try:
        aside.mkdir(exist_ok=True)
        names = join([work.file(part) for part in parts], aside)
        record = report(sum((aside / name).stat().st_size for name in names))
        names += write_companions(source, aside)
        quantization = config["quantization_config"]
        if quantization["quant_method"] == "gptq":
            write_json(aside / GPTQ_CONFIG, quantization)
            names.append(GPTQ_CONFIG)
        write_json(aside / CONFIG, config)
        _sync(aside, names)
        write_json(work.file(READY), {"files": [*names, CONFIG], "report": dict(record)})
    except OSError as error:
        raise failed("write", aside, error) from error
    return record


def ready(work: WorkFolder) -> dict[str, Any] | None:
    """The report of a quantization that only has to be moved to its place."""
    try:
        found: dict[str, Any] = json.loads(work.file(READY).read_bytes())["report"]
    except FileNotFoundError:
        return None
    return found


def move(work: WorkFolder) -> None:
    """Moves what is ready to the target and removes the work folder. Raises FileError."""
    files: list[str] = json.loads(work.file(READY).read_bytes())["files"]
    aside, target = work.file(ASIDE), work.target
    try:
        target.mkdir(exist_ok=True)
        for name in files:
            if (aside / name).exists():
                if name == CONFIG:
                    sync_folder(target)
                os.replace(aside / name, target / name)
        sync_folder(target)
    except OSError as error:
        raise failed("write", target, error) from error
    work.remove()


def _sync(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
