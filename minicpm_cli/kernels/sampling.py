"""Draws a token for each row of logits on a GPU, as engine/sampler.py does, for any mix of rows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quant.kernels import targets
from quant.kernels.nvrtc import KernelError


class DrawState(Protocol):
    """How each of S rows is drawn, on the device. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    @property
    def seed(self) -> Tensor: ...  # int64
    @property
    def index(self) -> Tensor: ...  # int64, tokens that the request has generated before
    @property
    def temperature(self) -> Tensor: ...  # float32
    @property
    def top_p(self) -> Tensor: ...  # float64 or float32
    @property
    def min_p(self) -> Tensor: ...  # float32
    @property
    def top_k(self) -> Tensor: ...  # int32


class PenaltyState(Protocol):
    """Each row's seat and penalties, and what its seat has seen: 2 for every time in the answer, 1 for the prompt."""

    @property
    def seat(self) -> Tensor: ...  # [S] int32, -1: no penalties
    @property
    def repetition(self) -> Tensor: ...  # [S] float32
    @property
    def frequency(self) -> Tensor: ...  # [S] float32
    @property
    def presence(self) -> Tensor: ...  # [S] float32
    @property
    def counts(self) -> Tensor: ...  # [seats, V] int32


class Kernels(Protocol):
    def __call__(
        self,
        logits: Tensor,
        state: DrawState | None,
        penalties: PenaltyState | None,
        allowed: Tensor | None,
        ids: Tensor,
        peaks: Tensor,
        /,
    ) -> None:
        """Draws at least one row; without a state the likeliest token."""


class Draws:
    """What a step draws by."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __call__(
        self,
        logits: Tensor,  # [S, V] float32, bfloat16 or float16; what penalties and mask make of them is float32
        state: DrawState,
        penalties: PenaltyState | None = None,
        allowed: Tensor | None = None,  # [S, ceil(V / 32)] int32, bit b of word w is token 32 * w + b
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ids [S] int64 and peaks [S] float32, into `out` if given: not finite where the row cannot be drawn.

        Each token that is drawn is counted in the seat of its row.
        """
        ids, peaks = out or results(logits)
        if len(logits):
            self.kernels(logits, state, penalties, allowed, ids, peaks)
        return ids, peaks

    def greedy(self, logits: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The same for rows that are all greedy."""
        ids, peaks = out or results(logits)
        if len(logits):
            self.kernels(logits, None, None, None, ids, peaks)
        return ids, peaks


def results(logits: Tensor) -> tuple[Tensor, Tensor]:
    count = len(logits)
    return logits.new_empty(count, dtype=torch.int64), logits.new_empty(count, dtype=torch.float32)


def draws_for(rows: int, vocab: int, device: torch.device | str, folder: Path | None = None) -> Draws:
    """For up to `rows` rows. In one launch on Hopper, compiled now or read from `folder`; elsewhere, and where that
    fails, in Triton, which takes 8 bytes a logit for the lists between its launches."""
    device = torch.device(device)
    if targets.unavailable(device) is None:
        from minicpm_cli.kernels.sampling_cuda import CUDADraws

        with suppress(KernelError):
            return Draws(CUDADraws(device, folder))
    from minicpm_cli.kernels.sampling_triton import TritonDraws

    return Draws(TritonDraws(rows, vocab, device))
