"""The tensors outside the blocks as the output holds them. A tied head never makes the embedding anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.errors import UsageError, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.shapes import EMBED, HEAD, Shape, tensor_shapes
from minicpm_cli.quantize.folder import WorkFolder
from minicpm_cli.quantize.layers import head_layer, misfit_of_head
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.solve import restored, rounded
from minicpm_cli.quantize.tensors import read_tensors, written

OUTER = "outer.safetensors"


@dataclass(frozen=True, slots=True)
class Outer:
    """`original` as the source holds them, `plain` what the written ones stand for; both without a tied head."""

    original: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    tie: bool
    narrowed: bool

    @property
    def same(self) -> bool:
        """Whether nothing was rounded."""
        return all(self.plain[name] is tensor for name, tensor in self.original.items())


def read_outer(path: Path, cfg: ModelConfig, recipe: Recipe, work: WorkFolder, adapter: Adapter | None = None) -> Outer:
    """Reads them, and writes their part if it is not there. Raises UsageError for --head-bits on a tied head."""
    original = read_tensors(path, cfg, outer_shapes(cfg), adapter)
    tie = _settled(original, cfg)
    check_head(cfg, recipe, tie=tie)
    plain = {name: written(tensor) for name, tensor in original.items()}
    stored = dict(plain)
    if recipe.head_bits == 8:
        layer = head_layer(cfg)
        tensors = rounded(layer, original[HEAD], recipe.head_scheme).tensors
        stored |= {f"{layer.name}.{end}": tensor for end, tensor in tensors.items()}
        plain[HEAD] = restored(tensors, recipe.head_scheme, torch.device("cpu"))
        del stored[HEAD]
    if not work.file(OUTER).exists():
        work.save(OUTER, stored, {})
    narrowed = any(tensor.dtype != plain[name].dtype for name, tensor in original.items() if name != HEAD)
    return Outer(original, plain, tie, narrowed)


def outer_shapes(cfg: ModelConfig) -> dict[str, Shape]:
    """With the head, which a file may hold although it is tied."""
    shapes = {name: shape for name, shape in tensor_shapes(cfg).items() if not name.startswith("model.layers.")}
    return shapes | {HEAD: (cfg.vocab, cfg.hidden_size)}


def check_head(cfg: ModelConfig, recipe: Recipe, *, tie: bool) -> None:
    if recipe.head_bits != 8:
        return
    if tie:
        raise UsageError(
            "--head-bits 8 is not possible here: the head is tied to the embedding, whose table it would change. The "
            "load option --head-bits 8 of the other commands makes an 8-bit head of its own."
        )
    if misfit := misfit_of_head(cfg, recipe):
        raise UsageError(f"--head-bits 8 is not possible here: {misfit}")


def _settled(original: dict[str, Tensor], cfg: ModelConfig) -> bool:
    """Whether the head is the embedding; a copy of it goes. As the decoder decides it."""
    if HEAD not in original:
        if not cfg.tie:
            raise WeightsError(f"{HEAD} is missing and config.json says that it is not tied; fetch the files again")
        return True
    if not cfg.tie:
        return False
    if torch.equal(original[EMBED], original[HEAD]):
        del original[HEAD]
        return True
    if cfg.tie_explicit:
        raise WeightsError(f"config.json says that {HEAD} is tied to {EMBED}, but the files hold both and they differ")
    return False
