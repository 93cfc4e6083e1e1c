"""A decoder whose every logit is a hash of the whole history, read back through the paged cache.

It keeps (token, position) at each slot, and works on what the page table leads to: a wrong page, slot, position or
length changes its output. `reference` computes the same from the plain list of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch

VOCAB = 97


def reference(history: list[int], vocab: int = VOCAB) -> Tensor:
    """Logits [V] after `history`."""
    state = 7
    for token in history:
        state = (state * 1_000_003 + token + 11) % (2**61 - 1)
    return torch.from_numpy(np.random.default_rng(state).normal(size=vocab).astype(np.float32) * 2)


@dataclass
class FakeDecoder:
    pages: int
    page_size: int
    vocab: int = VOCAB
    before_step: Callable[[int], None] | None = None
    spoil: Callable[[list[int], Tensor], Tensor] | None = None
    alike_rows: int | None = None
    steps: int = 0
    tokens: int = 0
    largest_step: int = 0
    batches: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.cfg = SimpleNamespace(vocab=self.vocab)
        self.cache = np.full((self.pages * self.page_size, 2), -1)

    def forward(self, batch: ForwardBatch, kv: object) -> Tensor:
        self.steps += 1
        if self.before_step:
            self.before_step(self.steps - 1)
        self.tokens += len(batch.ids)
        self.largest_step = max(self.largest_step, len(batch.ids))
        self.batches.append(batch.q_lens)
        self._check(batch)
        slots, ids, positions = (t.tolist() for t in (batch.slots, batch.ids, batch.positions))
        assert min(slots) >= self.page_size, "the dummy page was written"
        assert len(set(slots)) == len(slots)
        for slot, token, position in zip(slots, ids, positions, strict=True):
            self.cache[slot] = token, position
        owners = torch.searchsorted(batch.q_start[1:].long(), batch.last, right=True).tolist()
        logits = [self._logits(batch, row, positions[at] + 1) for row, at in zip(owners, batch.last, strict=True)]
        return torch.stack(logits) if logits else torch.empty(0, self.vocab)

    def _logits(self, batch: ForwardBatch, row: int, length: int) -> Tensor:
        table = batch.page_table[row].tolist()
        places = [table[i // self.page_size] * self.page_size + i % self.page_size for i in range(length)]
        read = self.cache[places]
        assert read[:, 1].tolist() == list(range(length)), "a key of another position was read"
        history = read[:, 0].tolist()
        logits = reference(history, self.vocab)
        return self.spoil(history, logits) if self.spoil else logits

    def _check(self, batch: ForwardBatch) -> None:
        assert batch.ids.dtype == batch.positions.dtype == batch.slots.dtype == batch.last.dtype == torch.int64
        assert batch.q_start.dtype == batch.kv_len.dtype == batch.page_table.dtype == torch.int32
        assert tuple(batch.q_start.diff().tolist()) == batch.q_lens
        assert tuple(batch.kv_len.tolist()) == batch.kv_lens
        assert batch.max_q == max(batch.q_lens)
        assert batch.max_kv == max(batch.kv_lens)
        assert min(batch.q_lens) >= 1
        for row, (new, total, run) in enumerate(zip(batch.q_lens, batch.kv_lens, batch.runs, strict=True)):
            start = int(batch.q_start[row])
            assert batch.positions[start : start + new].tolist() == list(range(total - new, total))
            table = batch.page_table[row, : -(-total // self.page_size)].tolist()
            if run >= 0:
                assert table == list(range(run, run + len(table)))
