"""Draws a token for each row of logits on a GPU, as engine/sampler.py does, in four launches for any mix of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from minicpm_cli.kernels import sampling_passes as passes
from minicpm_cli.kernels.launch import dependent, early
from minicpm_cli.kernels.sampling_passes import EDGES

LANES = 1024  # scores of the lists that are looked at together
STEPS = (1, 4, 8)  # numbers of rows from which on the shape is another one


class Shape(NamedTuple):
    """Tokens and warps of a program: `tile` of the chunk's tokens are compared with the edges at a time."""

    chunk: int
    tile: int
    peak_warps: int
    edge_warps: int
    last_warps: int


def shape_for(rows: int) -> Shape:
    """Few rows are spread over all multiprocessors, many over few programs each."""
    if rows < STEPS[1]:
        return Shape(1024, 1024, 4, 8, 8)
    if rows < STEPS[2]:
        return Shape(2048, 512, 4, 4, 8)
    return Shape(4096, 256, 8, 4, 8)


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


class Draws:
    """The memory between the launches, made once: 4 * rows * vocab bytes of it for the lists."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device | str, shape: Callable[[int], Shape] = shape_for
    ) -> None:
        self.rows, self.vocab, self.shape = rows, vocab, shape
        cells = 0
        longest = 0
        for count in {*STEPS, *(step - 1 for step in STEPS), rows} & set(range(1, rows + 1)):
            chunk = shape(count).chunk
            chunks = count * -(-vocab // chunk)
            cells, longest = max(cells, chunks), max(longest, chunks * chunk)

        def array(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.key, self.id, self.length = (array(cells, torch.int32) for _ in range(3))
        self.mass, self.above_mass, self.floor_mass = (array(cells, torch.float64) for _ in range(3))
        self.sums, self.fine_sums = (array(cells * EDGES.value, torch.float32) for _ in range(2))
        self.edges, self.fine_edges = (array(rows * EDGES.value, torch.float32) for _ in range(2))
        self.goals, self.above = array(rows, torch.float64), array(rows, torch.float32)
        self.arrived = array(rows, torch.int32)
        self.listed = array(longest, torch.float32)

    def __call__(
        self,
        logits: Tensor,  # [S, V] float32 or bfloat16; penalties and mask change them in place
        state: DrawState,
        penalties: PenaltyState | None = None,
        allowed: Tensor | None = None,  # [S, ceil(V / 32)] int32, bit b of word w is token 32 * w + b
    ) -> tuple[Tensor, Tensor]:
        """Ids [S] int64 and peaks [S] float32: not finite where the row cannot be drawn."""
        count = len(logits)
        ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        peak = torch.empty(count, dtype=torch.float32, device=logits.device)
        if count:
            self._launch(logits, state, penalties, allowed, ids, peak)
        return ids, peak

    def _launch(
        self, logits: Tensor, s: DrawState, pen: PenaltyState | None, allowed: Tensor | None, ids: Tensor, peak: Tensor
    ) -> None:
        count, vocab = logits.shape
        assert count <= self.rows
        assert (vocab, 1) == (self.vocab, logits.stride(1))
        shape = self.shape(count)
        grid = (-(-vocab // shape.chunk), count)
        blocks = triton.next_power_of_2(grid[0])
        row = (s.temperature, s.top_p, s.min_p, s.top_k)
        matrix = (logits, logits.stride(0), vocab)
        seats, counts = (None, None) if pen is None else (pen.seat, pen.counts)
        rates = (None, None, None) if pen is None else (pen.repetition, pen.frequency, pen.presence)
        sizes: dict[str, Any] = {"CHUNK": shape.chunk, "EARLY": early(logits), **dependent(logits)}
        tile = {"BLOCKS": blocks, "TILE": shape.tile, "num_warps": shape.edge_warps}
        passes.peaks[grid](
            *matrix, *row, seats, counts, *rates, allowed, 0 if allowed is None else allowed.stride(0),
            self.key, self.id, self.mass, self.arrived, **sizes, num_warps=shape.peak_warps,
        )  # fmt: skip
        passes.coarse[grid](
            *matrix, s.seed, s.index, *row, seats, counts, self.key, self.id, self.mass, ids, peak, self.goals,
            self.edges, self.sums, **tile, **sizes,
        )  # fmt: skip
        passes.fine[grid](
            *matrix, *row, peak, self.goals, self.edges, self.sums, self.fine_edges, self.fine_sums, self.above,
            **tile, **sizes,
        )  # fmt: skip
        passes.last[grid](
            *matrix, s.seed, s.index, *row, seats, counts, ids, peak, self.goals, self.fine_edges, self.fine_sums,
            self.above, self.listed, self.length, self.above_mass, self.floor_mass, self.arrived,
            BLOCKS=blocks, WIDTH=max(LANES // blocks, 8), num_warps=shape.last_warps, **sizes,
        )  # fmt: skip


def draw(logits: Tensor, state: DrawState) -> tuple[Tensor, Tensor]:
    """One draw with memory of its own: `Draws` keeps it."""
    return Draws(len(logits), logits.shape[1], logits.device)(logits, state)
