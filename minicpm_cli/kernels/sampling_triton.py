"""`sampling` in Triton: four launches for any mix of rows, where sampling_cuda.py does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from minicpm_cli.kernels import sampling_passes as passes
from minicpm_cli.kernels.launch import dependent, early
from minicpm_cli.kernels.sampling import DrawState, PenaltyState
from minicpm_cli.kernels.sampling_parts import EDGES

LANES = 1024  # scores of the lists that are looked at together
STEPS = (1, 8)  # numbers of rows from which on the shape is another one: each is compiled anew, which takes seconds


class Shape(NamedTuple):
    """Tokens of a program, warps of it in each of the passes, and a row's listed scores that are many."""

    chunk: int
    peaks: int
    coarse: int
    fine: int
    many: int = 16384


def shape_for(rows: int) -> Shape:
    """Few rows are spread over all multiprocessors, many over few programs each."""
    return Shape(1024, 4, 4, 4) if rows < STEPS[1] else Shape(4096, 8, 8, 4)


class TritonDraws:
    """The memory between the launches, made once: 8 * rows * vocab bytes of it for the lists."""

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

        self.key, self.id, self.length, self.fine_length, self.near_length = (
            array(cells, torch.int32) for _ in range(5)
        )
        self.mass, self.over, self.floor = (array(cells, torch.float64) for _ in range(3))
        self.sums, self.fine_sums = (array(cells * EDGES.value, torch.float32) for _ in range(2))
        self.edges, self.fine_edges = (array(rows * EDGES.value, torch.float32) for _ in range(2))
        self.goals, self.above = array(rows, torch.float64), array(rows, torch.float32)
        self.low = array(cells, torch.float32)
        self.arrived, self.found = (array(rows, torch.int32) for _ in range(2))
        self.listed, self.near = (array(longest, torch.float32) for _ in range(2))

    def __call__(
        self,
        logits: Tensor,  # [S, V]; penalties and mask change them in place where they are float32
        s: DrawState | None,
        pen: PenaltyState | None,
        allowed: Tensor | None,
        ids: Tensor,
        peak: Tensor,
    ) -> None:
        """See `sampling.Draws`. Rows that are all greedy take two launches."""
        if pen is not None or allowed is not None:
            logits = logits.float()
        count, vocab = logits.shape
        assert count <= self.rows
        assert (vocab, 1) == (self.vocab, logits.stride(1))
        shape = self.shape(count)
        grid = (-(-vocab // shape.chunk), count)
        full: dict[str, Any] = {"CHUNK": shape.chunk, "EARLY": early(logits)}
        full |= dependent(logits)
        blocks: dict[str, Any] = {"BLOCKS": triton.next_power_of_2(grid[0]), **full}
        width: dict[str, Any] = {"WIDTH": max(LANES // blocks["BLOCKS"], 8), "num_warps": shape.fine, **blocks}
        row = (None,) * 4 if s is None else (s.temperature, s.top_p, s.min_p, s.top_k)
        numbers = (None, None) if s is None else (s.seed, s.index)
        matrix = (logits, logits.stride(0), vocab)
        seats = (None, None) if pen is None else (pen.seat, pen.counts)
        rates = (None, None, None) if pen is None else (pen.repetition, pen.frequency, pen.presence)
        passes.peaks[grid](
            *matrix, *row, *seats, *rates, allowed, 0 if allowed is None else allowed.stride(0),
            self.key, self.id, self.low, self.mass, self.arrived, self.found, num_warps=shape.peaks, **full,
        )  # fmt: skip
        passes.coarse[grid](
            *matrix, *numbers, *row, *seats, self.key, self.id, self.low, self.mass, ids, peak, self.goals,
            self.edges, self.sums, self.listed, self.length,
            LANES=min(shape.coarse * 32, shape.chunk), num_warps=shape.coarse, **blocks,
        )  # fmt: skip
        if s is None:
            return
        shared = (*matrix, *numbers, *row, *seats, ids, peak, self.goals)
        closing = (self.near, self.found, self.arrived, self.near_length, self.over, self.floor)
        passes.fine[grid](
            *shared, self.edges, self.sums, self.listed, self.length, *closing,
            self.fine_edges, self.fine_sums, self.above, self.fine_length, MANY=shape.many,
            LANES=min(shape.fine * 32, shape.chunk), **width,
        )  # fmt: skip
        passes.last[grid](
            *shared, self.listed, self.fine_length, *closing, self.fine_edges, self.fine_sums, self.above, **width,
        )  # fmt: skip
