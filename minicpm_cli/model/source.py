"""Where a decoder's tensors come from: one protocol over safetensors, PyTorch .bin and GGUF files.

The decoder pulls each tensor by its Hugging Face name, so no more than what it asked for is ever in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.bin_source import BinSource
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf_source import GGUFSource
from minicpm_cli.model.quantized import open_quantized
from minicpm_cli.model.safetensors_source import SafetensorsSource
from minicpm_cli.model.shapes import tensor_shapes
from minicpm_cli.model.shards import bin_files, safetensors_files
from minicpm_cli.model.staging import StagedSource
from quant.pack import Packed

Stored = Tensor | Packed
S = TypeVar("S")


class TensorSource(Protocol):
    """The tensors of a checkpoint by Hugging Face name; every one must be taken or ignored before `finish`."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> set[str]:
        """All names in the files."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape; raises WeightsError if there is no such tensor."""

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor: read-only (it may be the file itself, mapped), valid while it is referenced.

        Raises WeightsError naming file, tensor, what was expected and what was found.
        """

    def ignore(self, name: str) -> None:
        """Accounts for a tensor that is not wanted."""

    def finish(self) -> None:
        """Closes the files; raises WeightsError listing the tensors that nobody asked for."""


def open_source(
    path: Path, cfg: ModelConfig, gptq_format: str | None = None, device: torch.device | None = None
) -> TensorSource:
    """Opens a checkpoint folder (safetensors before .bin before .gguf) or a .gguf file and checks its headers.

    `gptq_format` (v1, v2) says how GPTQ's zero points are stored where the checkpoint does not. Plain tensors, and the
    parts of packed ones, go to `device` as they are taken if it is a GPU. Raises WeightsError for damaged or missing
    files, UnsupportedModel for packings that are not read.
    """
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise WeightsError(f"{path} is not a model folder or .gguf file; give the folder that holds config.json")
        return _staged(GGUFSource(path, cfg), device)
    if tensors := safetensors_files(path):
        return open_quantized(_staged(SafetensorsSource(tensors, cfg), device, cfg), path, gptq_format)
    if pickled := bin_files(path):
        return open_quantized(_staged(BinSource(pickled, cfg), device), path, gptq_format)
    return _staged(GGUFSource(_only_gguf(path), cfg), device)


def _staged(source: S, device: torch.device | None, cfg: ModelConfig | None = None) -> S:
    """`source` on its way to a GPU; by `cfg` the matrices are begun before they are asked for."""
    if device is None or device.type != "cuda":
        return source
    ahead = [(name, shape) for name, shape in tensor_shapes(cfg).items() if len(shape) == 2] if cfg else []
    return cast(S, StagedSource(source, device, ahead))


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise WeightsError(f"{folder} holds {len(found)} GGUF files: name one of {', '.join(f.name for f in found)}")
    if not found:
        raise WeightsError(
            f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin (or shards of them with their "
            "index) or a .gguf file. Fetch the model again."
        )
    return found[0]
