"""Which tokens a step may draw: the masks of its rows, filled by the host and laid over the scores on the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicpm_cli.engine.sequence import Sequence

Words = NDArray[np.int32]  # [S, ceil(V / 32)], bit b of word w stands for token 32 * w + b


def words_of(vocab: int) -> int:
    return -(-vocab // 32)


def fill_masks(words: Words, seqs: list[Sequence]) -> dict[int, Exception]:
    """Fills a row for each sequence; the errors of masks that failed, by row. A finished sequence is let be."""
    errors: dict[int, Exception] = {}
    words[:] = -1
    for row, seq in enumerate(seqs):
        if seq.request.mask is None or seq.finished:
            continue
        try:
            seq.request.mask.fill(words[row])
        except Exception as error:  # noqa: BLE001 - a request's own mask ends that request only
            words[row] = -1
            errors[row] = error
    return errors


def masked(logits: Tensor, seqs: list[Sequence]) -> tuple[Tensor, dict[int, Exception]]:
    """Logits [S, V] without the tokens that a sequence's mask forbids, and the errors of masks that failed, by row."""
    rows = [row for row, seq in enumerate(seqs) if seq.masked]
    if not rows:
        return logits, {}
    words = np.empty((len(rows), words_of(logits.shape[-1])), np.int32)
    errors = {rows[place]: error for place, error in fill_masks(words, [seqs[row] for row in rows]).items()}
    bits = torch.from_numpy(words).to(logits.device)
    if len(rows) == len(seqs):
        return apply_bitmask(logits, bits), errors
    index = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, index, apply_bitmask(logits[index], bits)), errors


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:  # [S, V], [S, ceil(V/32)] int32 -> [S, V]
    if words.device.type == "cpu":  # 20 us for 49,152 tokens instead of 65
        unpacked = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
        allowed = torch.from_numpy(unpacked).view(torch.bool)
    else:
        shifts = torch.arange(32, dtype=torch.int32, device=words.device)
        allowed = (words.unsqueeze(-1) >> shifts & 1).flatten(1).bool()
    return torch.where(allowed[:, : logits.shape[-1]], logits, -math.inf)
