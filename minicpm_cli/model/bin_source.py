"""Tensors from PyTorch's pickled files, of which only plain tensors are accepted: a pickle can run any code, so
everything goes through `weights_only`, which runs none."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.ledger import Ledger
from minicpm_cli.model.shards import Shards, unreadable

ZIP = b"PK\x03\x04"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CODE = re.compile(r"GLOBAL ([\w.]+)|function ([\w.]+)")


class BinSource:
    """Holds one shard at a time; zip archives (torch >= 1.6) are mapped, older files are read whole."""

    def __init__(self, shards: Shards, cfg: ModelConfig) -> None:
        self._shards = shards
        self._current: tuple[Path, dict[str, Tensor]] | None = None
        self._files = shards.index if shards.index is not None else self._list(shards)
        where = shards.files[0] if len(shards.files) == 1 else shards.folder
        self._ledger = Ledger(where, cfg, self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._files:
            raise self._ledger.missing(name)
        return tuple(self._load(self._files[name])[name].shape)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._ledger.use(name)
        file = self._files[name]
        tensor = self._load(file)[name]
        self._ledger.check_shape(file, name, tuple(tensor.shape), shape)
        if tensor.dtype not in FLOATS or tensor.layout != torch.strided:
            raise WeightsError(f"{file}: tensor {name} is {tensor.dtype} ({tensor.layout}), expected dense floats")
        return tensor

    def raw(self, name: str) -> Tensor:
        self._ledger.use(name)
        return self._load(self._files[name])[name]

    def file(self, name: str) -> Path:
        return self._files.get(name, self._ledger.where)

    def ignore(self, name: str) -> None:
        self._ledger.ignore(name)

    def finish(self) -> None:
        self._current = None
        self._ledger.finish()

    def _list(self, shards: Shards) -> dict[str, Path]:
        """Where no index says it, the files themselves are asked for their names."""
        files: dict[str, Path] = {}
        for file in shards.files:
            found = self._load(file)
            for name in found.keys() & files.keys():
                raise WeightsError(f"tensor {name} is in both {files[name]} and {file.name}; remove one of the two")
            files |= dict.fromkeys(found, file)
        return files

    def _load(self, file: Path) -> dict[str, Tensor]:
        if self._current is None or self._current[0] != file:
            self._current = None  # the old shard goes before the new one comes
            tensors = read_tensors(file)
            self._shards.check(file, set(tensors))
            self._current = file, tensors
        return self._current[1]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The state dict in a .bin file. Raises WeightsError if it holds anything but tensors by name."""
    state = _unpickle(file)
    if not isinstance(state, dict):
        raise WeightsError(f"{file} holds a {type(state).__name__}, expected tensors by name")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(f"{file}: entry {name!r} is a {type(value).__name__}, expected a tensor")
    return {name: value.detach() for name, value in state.items()}


def _unpickle(file: Path) -> Any:
    try:
        with open(file, "rb") as opened:
            zipped = opened.read(len(ZIP)) == ZIP
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on pickles of other protocols
            return torch.load(file, map_location="cpu", mmap=zipped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, str(error)) from None
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from error
    except Exception as error:
        raise unreadable(file, f"PyTorch cannot read its {file.stat().st_size} bytes ({_first_line(error)})") from error


def _refused(file: Path, message: str) -> WeightsError:
    """torch's own text recommends loading without the check, which is the one thing not to do."""
    match = _CODE.search(message)
    if not match:
        return unreadable(file, "not a pickle of plain tensors")
    return WeightsError(
        f"{file} tries to run code when it is loaded ({match[1] or match[2]}); it was refused and nothing ran. "
        "Get the model as safetensors, or from a source you trust."
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
