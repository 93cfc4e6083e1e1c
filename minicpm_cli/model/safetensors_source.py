"""Tensors from safetensors files, mapped. The header is checked against the file's size before anything is mapped:
a torn download must not turn into zeros and nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.ledger import Ledger
from minicpm_cli.model.safetensors_header import BITS, FLOATS, Entry, all_entries, read_entries
from minicpm_cli.model.shards import Shards, unreadable

__all__ = ["BITS", "Entry", "SafetensorsSource", "read_entries"]


class SafetensorsSource:
    def __init__(self, shards: Shards, cfg: ModelConfig) -> None:
        self._entries = all_entries(shards)
        self._ledger = Ledger(_place(shards), cfg, self._entries)
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            raise self._ledger.missing(name)
        return self._entries[name].shape

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._ledger.use(name)
        entry = self._entries[name]
        self._ledger.check_shape(entry.file, name, entry.shape, shape)
        if entry.dtype not in FLOATS:
            raise WeightsError(f"{entry.file}: tensor {name} is {entry.dtype}, expected one of {', '.join(FLOATS)}")
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        self._ledger.use(name)
        tensor: Tensor = self._handle(self._entries[name].file).get_tensor(name)
        return tensor

    def file(self, name: str) -> Path:
        return self._entries[name].file if name in self._entries else self._ledger.where

    def ignore(self, name: str) -> None:
        self._ledger.ignore(name)

    def finish(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._ledger.finish()

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise unreadable(file, f"safetensors cannot open it ({error})") from error
        return self._open[file]


def _place(shards: Shards) -> Path:
    return shards.files[0] if len(shards.files) == 1 else shards.folder
