"""A decoder of tensor operations alone, whose every logit is a hash of the whole history: a graph can capture it.

Like the fake decoder it reads the history back through the page table, by what each slot holds.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch

VOCAB = 97
FACTOR = 0x2545F4914F6CDD1D


def mixed(x: Tensor) -> Tensor:
    """Scattered int64, the same on every device: products wrap around."""
    x = x * FACTOR
    x = x ^ (x >> 29 & 0x7FFFFFFFF)
    x = x * FACTOR
    return x ^ (x >> 32 & 0xFFFFFFFF)


def scores(states: Tensor, vocab: int = VOCAB) -> Tensor:  # [S] -> [S, V] float32
    places = torch.arange(1, vocab + 1, device=states.device)
    return (mixed(states[:, None] + places * 7919) >> 40 & 0xFFFF).float() / 2**13


def state_of(history: list[int]) -> Tensor:  # [1]
    tokens = torch.tensor(history)
    return mixed(tokens * 1_000_003 + torch.arange(len(history))).sum()[None]


def reference(history: list[int], vocab: int = VOCAB) -> Tensor:  # [V]
    return scores(state_of(history), vocab)[0]


class TensorDecoder:
    def __init__(self, pages: int, page_size: int, device: str = "cpu") -> None:
        self.device, self.cfg, self.page_size = torch.device(device), SimpleNamespace(vocab=VOCAB), page_size
        self.tokens = torch.zeros(pages * page_size, dtype=torch.int64, device=device)
        self.offsets = torch.arange(page_size, device=device)

    def forward(self, batch: ForwardBatch, kv: object) -> Tensor:
        return scores(self.states(batch))

    def states(self, batch: ForwardBatch) -> Tensor:  # [S]
        self.tokens.index_copy_(0, batch.slots, batch.ids * 1_000_003 + batch.positions)
        owners = torch.searchsorted(batch.q_start[1:].long(), batch.last, right=True)
        slots = (batch.page_table[owners, :, None].long() * self.page_size + self.offsets).flatten(1)
        read = torch.arange(slots.shape[1], device=self.device) < batch.positions[batch.last, None] + 1
        return (mixed(self.tokens[slots]) * read).sum(-1)
