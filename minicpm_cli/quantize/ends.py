"""What lies outside the blocks: the embedding before the first, the norm and the head behind the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from minicpm_cli.kernels.ops import ops_for
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.shapes import EMBED, HEAD
from minicpm_cli.model.weights import Weights
from minicpm_cli.quantize.block import Held
from minicpm_cli.quantize.stream import Stream


class Window(Protocol):
    """A held-out row of token ids; those from index `first` on are predicted."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def first(self) -> int: ...


def embedder(
    cfg: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:  # ids [T] -> [T, H]
    """Looks rows up where the table lies, so that no copy of it is made."""
    table = tensors[EMBED]

    def embed(ids: Tensor) -> Tensor:
        h = functional.embedding(ids, table).to(dtype)
        return h * cfg.embed_scale if cfg.embed_scale != 1.0 else h

    return embed


@dataclass(frozen=True, slots=True)
class Kept:
    """Predicts held-out windows from their states behind the last block, one of which is a row of `stream`."""

    stream: Stream
    order: Mapping[tuple[int, ...], int]  # a window's ids -> its row
    head: Decoder

    @classmethod
    def of(cls, stream: Stream, windows: Sequence[Window], head: Decoder) -> Kept:
        return cls(stream, {window.ids: row for row, window in enumerate(windows)}, head)

    @property
    def vocab(self) -> int:
        return self.head.cfg.vocab

    def states(self, window: Window) -> Tensor:  # [P, H]
        return self.stream.row(self.order[window.ids])[window.first - 1 : -1]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:  # [R, H] -> [R, V] float32
        return self.head.logits(states)


def head_of(cfg: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Decoder:
    """Norm and head alone: a decoder without blocks, whose embedding is the head's matrix."""
    ends = dict(tensors)
    ends[EMBED] = ends.pop(HEAD, ends[EMBED])
    with torch.inference_mode():
        return Decoder(replace(cfg, layers=0, tie=True), Weights(Held(ends), device, dtype), ops_for(device))
