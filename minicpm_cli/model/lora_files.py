"""The weights of an adapter: which tensors there are, before torch is loaded, and each of them when it is asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicpm_cli.errors import WeightsError
from minicpm_cli.hub.files import sha256
from minicpm_cli.model.lora_config import CONFIG
from minicpm_cli.model.safetensors_header import FLOATS, read_entries
from minicpm_cli.model.shards import unreadable

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, BIN = "adapter_model.safetensors", "adapter_model.bin"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of an adapter's file: its shape and the bytes of an element."""

    shape: Shape
    itemsize: int


def weights_file(folder: Path) -> Path:
    """safetensors before .bin. Raises WeightsError."""
    for name in (SAFETENSORS, BIN):
        if (folder / name).is_file():
            return folder / name
    raise WeightsError(f"{folder} holds no {SAFETENSORS} (or {BIN}); fetch the adapter again")


def identity(folder: Path) -> dict[str, Any]:
    """JSON values that change when the adapter does: where it lies, and a hash of its files."""
    digest = hashlib.sha256()
    for file in (folder / CONFIG, weights_file(folder)):
        if file.is_file():
            digest.update(bytes.fromhex(sha256(file)))
    return {"path": str(folder.resolve()), "sha256": digest.hexdigest()}


def stored_tensors(file: Path) -> Mapping[str, TensorHeader]:
    """From the header alone; a .bin is read, by `weights_only`. Raises WeightsError for anything but floats."""
    if file.suffix == ".bin":
        return {name: TensorHeader(tuple(t.shape), t.element_size()) for name, t in _unpickled(file).items()}
    found = {}
    for name, entry in read_entries(file).items():
        if entry.dtype not in FLOATS:
            raise WeightsError(f"{file}: tensor {name} is {entry.dtype}, expected one of {', '.join(FLOATS)}")
        found[name] = TensorHeader(entry.shape, (entry.end - entry.begin) // max(math.prod(entry.shape), 1))
    return found


class AdapterTensors:
    """The tensors of `file`, mapped. `close` when no more will be asked for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open: Any = None

    def __getitem__(self, name: str) -> Tensor:
        if self._open is None:
            self._open = _unpickled(self._file) if self._file.suffix == ".bin" else _opened(self._file)
        tensor: Tensor = self._open[name] if isinstance(self._open, dict) else self._open.get_tensor(name)
        return tensor

    def close(self) -> None:
        if self._open is not None and not isinstance(self._open, dict):
            self._open.__exit__(None, None, None)
        self._open = None


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise unreadable(file, f"safetensors cannot open it ({error})") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    from minicpm_cli.model.bin_source import FLOATS as TORCH_FLOATS
    from minicpm_cli.model.bin_source import read_tensors

    tensors = read_tensors(file)
    for name, tensor in tensors.items():
        if tensor.dtype not in TORCH_FLOATS:
            raise WeightsError(f"{file}: tensor {name} is {tensor.dtype}, expected floats")
    return tensors
