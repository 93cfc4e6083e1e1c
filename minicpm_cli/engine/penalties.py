"""Repetition, presence and frequency penalties, with each sequence's tokens counted once and kept up as it grows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minicpm_cli.engine.sequence import Sequence


class Penalties:
    """A row of counts for each sequence that uses penalties; rows of finished ones are used again.

    repetition: the score of every token of prompt and answer is divided by it if positive, else multiplied (CTRL,
    Keskar et al. 2019, as transformers has it). frequency and presence: subtracted from the score of every token of
    the answer, times its count and once (as OpenAI's API has them). Repetition comes first.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.clear()

    def clear(self) -> None:
        self._rows: dict[Sequence, int] = {}
        self._seen = torch.zeros(0, self.vocab, dtype=torch.bool, device=self.device)
        self._counts = torch.zeros(0, self.vocab, dtype=torch.int32, device=self.device)

    def apply(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:  # [S, V] -> [S, V], the same if nothing is to do
        places = [i for i, seq in enumerate(seqs) if seq.penalised]
        if not places:
            return logits
        chosen = [seqs[i] for i in places]
        rows = [self._row(seq) for seq in chosen]
        if len(places) == len(seqs):
            return self._penalised(logits, chosen, rows)
        index = torch.tensor(places, device=self.device)
        return logits.index_copy(0, index, self._penalised(logits[index], chosen, rows))

    def note(self, seqs: list[Sequence], ids: Tensor) -> None:  # [S]
        """The token drawn for each sequence."""
        places = [i for i, seq in enumerate(seqs) if seq.penalised]
        if places:
            rows = torch.tensor([self._rows[seqs[i]] for i in places], device=self.device)
            chosen = ids[torch.tensor(places, device=self.device)]
            self._seen[rows, chosen] = True
            self._counts[rows, chosen] += 1

    def _penalised(self, logits: Tensor, seqs: list[Sequence], rows: list[int]) -> Tensor:
        params = [seq.request.params for seq in seqs]
        values = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], np.float32)
        repetition, frequency, presence = torch.from_numpy(values).to(self.device).T.unsqueeze(-1)
        if (values[:, 0] != 1).any():
            changed = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(self._of(self._seen, rows), changed, logits)
        if values[:, 1:].any():
            counts = self._of(self._counts, rows)
            logits = logits - counts * frequency - (counts > 0) * presence
        return logits

    def _of(self, state: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == 1:
            return state[rows[0] : rows[0] + 1]
        return state[torch.tensor(rows, device=self.device)]

    def _row(self, seq: Sequence) -> int:
        row = self._rows.get(seq)
        if row is None:
            row = self._free_row()
            self._seen[row], self._counts[row] = False, 0
            prompt = np.frombuffer(seq.tokens, np.int32)[: seq.prompt_length].astype(np.int64)
            self._seen[row, torch.from_numpy(prompt).to(self.device)] = True
            self._rows[seq] = row
        return row

    def _free_row(self) -> int:
        self._rows = {seq: row for seq, row in self._rows.items() if not seq.finished}
        free = set(range(len(self._seen))) - set(self._rows.values())
        if free:
            return min(free)
        size = len(self._seen)
        self._seen = _grown(self._seen)
        self._counts = _grown(self._counts)
        return size


def _grown(state: Tensor) -> Tensor:
    return torch.cat([state, state.new_zeros(max(1, len(state)), state.shape[1])])
