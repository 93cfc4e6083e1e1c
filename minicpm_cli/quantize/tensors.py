"""Reading a checkpoint a part at a time, so that no more of it than one block is ever in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.loader import DERIVED
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.lora_source import LoraSource
from minicpm_cli.model.shapes import HEAD, Shape, tensor_shapes
from minicpm_cli.model.shards import bin_files, safetensors_files
from minicpm_cli.model.source import TensorSource, open_source

WRITTEN = torch.bfloat16  # what wider tensors are written as: the type that the family was trained in


def read_tensors(
    path: Path, cfg: ModelConfig, shapes: Mapping[str, Shape], adapter: Adapter | None = None
) -> dict[str, Tensor]:
    """The named tensors, plain, in host memory. Plain files are mapped, and unmapped when the last tensor goes.

    A head that is not in the files is left out. What `adapter` changes comes merged, in float32.
    """
    source = _opened(path, cfg, adapter)
    found: dict[str, Tensor] = {}
    for name in sorted(source.names()):
        if name not in shapes:
            source.ignore(name)
    for name, shape in shapes.items():
        if name == HEAD and name not in source:
            continue
        stored = source.take(name, shape)
        found[name] = stored if isinstance(stored, Tensor) else stored.dequantize()
    source.finish()
    return found


def check_tensors(path: Path, cfg: ModelConfig, adapter: Adapter | None = None) -> None:
    """Raises WeightsError for tensors that are missing, left over or of a wrong shape, before hours are spent."""
    source = _opened(path, cfg, adapter)
    shapes = tensor_shapes(cfg)
    for name in sorted(source.names()):
        if name.endswith(DERIVED):
            source.ignore(name)
    if HEAD in source:
        shapes |= {HEAD: (cfg.vocab, cfg.hidden_size)}
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            source.take(name, shape)  # raises, naming the file and what is wrong
        source.ignore(name)
    source.finish()


def holds_head(path: Path, cfg: ModelConfig, adapter: Adapter | None = None) -> bool:
    """Whether the files have a head beside the embedding, which may be a copy of it."""
    source = _opened(path, cfg, adapter)
    names = source.names()
    for name in names:
        source.ignore(name)
    source.finish()
    return HEAD in names


def _opened(path: Path, cfg: ModelConfig, adapter: Adapter | None) -> TensorSource:
    source = open_source(path, cfg)
    return source if adapter is None else LoraSource(source, adapter, unpack=True)


def stored_bytes(path: Path) -> int:
    """Of the weights' files."""
    if path.is_file():
        return path.stat().st_size
    shards = safetensors_files(path) or bin_files(path)
    return sum(file.stat().st_size for file in (shards.files if shards else path.glob("*.gguf")))


def written(tensor: Tensor) -> Tensor:
    """A plain tensor as the output holds it."""
    return tensor.to(WRITTEN) if tensor.dtype in (torch.float32, torch.float64) else tensor
