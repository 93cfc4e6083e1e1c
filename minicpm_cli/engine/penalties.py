"""What is done to scores before a draw: a request's biases, and repetition, presence and frequency penalties, for which
each sequence's tokens are counted once and kept up as it grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minicpm_cli.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """The penalties of S rows on the device; seat -1 has none."""

    seat: Tensor  # [S] int32
    repetition: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    presence: Tensor  # [S] float32
    counts: Tensor  # [seats, V] int32: 2 for every time in the answer, 1 for being in the prompt


class Penalties:
    """A row of counts for each sequence that uses penalties, its seat; those of finished ones are used again.

    repetition: the score of every token of prompt and answer is divided by it if positive, else multiplied (CTRL,
    Keskar et al. 2019, as transformers has it). frequency and presence: subtracted from the score of every token of
    the answer, times its count and once (as OpenAI's API has them). Repetition comes first.

    With `seats` there are so many from the first use on, and their memory stays where it is.
    """

    def __init__(self, vocab: int, device: torch.device, seats: int = 0) -> None:
        self.vocab, self.device, self._least = vocab, device, seats
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        self._seats: dict[Sequence, int] = {}
        self._new: list[tuple[int, Tensor]] = []

    def seats(self, seqs: list[Sequence]) -> list[int]:
        """The seat of each sequence. `begin` must run on the device before the next draw of those that are new."""
        return [self._seat(seq) if seq.penalised else -1 for seq in seqs]

    def begin(self) -> Callable[[], None]:
        """What counts the prompts of the sequences that have just got a seat."""
        new, self._new = self._new, []

        def count() -> None:
            for seat, prompt in new:
                self.counts[seat].zero_().index_fill_(0, prompt.to(self.device, non_blocking=True), 1)

        return count

    def apply(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:  # [S, V] -> [S, V], the same if nothing is to do
        places = [i for i, seq in enumerate(seqs) if seq.penalised]
        if not places:
            return logits
        chosen = [seqs[i] for i in places]
        seats = self.seats(chosen)
        self.begin()()
        if len(places) == len(seqs):
            return self._penalised(logits, chosen, seats)
        index = torch.tensor(places, device=self.device)
        return logits.index_copy(0, index, self._penalised(logits[index], chosen, seats))

    def note(self, seqs: list[Sequence], ids: Tensor) -> None:  # [S]
        """The token drawn for each sequence."""
        places = [i for i, seq in enumerate(seqs) if seq.penalised]
        if places:
            seats = torch.tensor([self._seats[seqs[i]] for i in places], device=self.device)
            self.counts[seats, ids[torch.tensor(places, device=self.device)]] += 2

    def _penalised(self, logits: Tensor, seqs: list[Sequence], seats: list[int]) -> Tensor:
        values = rates(seqs)
        repetition, frequency, presence = torch.from_numpy(values).to(self.device).unsqueeze(-1)
        counts = self.counts[seats[0] : seats[0] + 1] if len(seats) == 1 else self.counts[torch.tensor(seats)]
        if (values[0] != 1).any():
            changed = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(counts > 0, changed, logits)
        if values[1:].any():
            answered = counts >> 1
            logits = logits - answered * frequency - (answered > 0) * presence
        return logits

    def _seat(self, seq: Sequence) -> int:
        seat = self._seats.get(seq)
        if seat is None:
            seat = self._seats[seq] = self._free_seat()
            prompt = torch.from_numpy(np.frombuffer(seq.tokens, np.int32)[: seq.prompt_length].astype(np.int64))
            self._new.append((seat, prompt.pin_memory() if self.device.type == "cuda" else prompt))
        return seat

    def _free_seat(self) -> int:
        self._seats = {seq: seat for seq, seat in self._seats.items() if not seq.finished}
        size = len(self.counts)
        free = set(range(size)) - set(self._seats.values())
        if not free:
            assert not (self._least and size), "more sequences than seats"
            more = self.counts.new_zeros(max(self._least, 1, size), self.vocab)
            self.counts = torch.cat([self.counts, more]) if size else more
            return size
        return min(free)


def biased(logits: Tensor, seqs: list[Sequence]) -> Tensor:  # [S, V] -> [S, V], the same if nothing is to do
    """With what each request adds to the scores of tokens (OpenAI's logit_bias)."""
    entries = [(row, *pair) for row, seq in enumerate(seqs) for pair in seq.request.params.logit_bias]
    if not entries:
        return logits
    rows, tokens, values = zip(*entries, strict=True)
    places = tuple(torch.tensor(place, device=logits.device) for place in (rows, tokens))
    return logits.index_put(places, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def rates(seqs: list[Sequence]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Repetition, frequency and presence penalties [3, S]."""
    params = [seq.request.params for seq in seqs]
    values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    return np.array(values, np.float32).reshape(-1, 3).T
