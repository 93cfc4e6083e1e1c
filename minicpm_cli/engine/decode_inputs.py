"""The inputs of decode steps: a buffer that is written, sent and read at the same places in every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicpm_cli.engine.inputs import ROW, Arrays, Layout, Shape, fill_draws
from minicpm_cli.engine.lockstep import Continued
from minicpm_cli.engine.pages import DUMMY
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.plan import Chunk, Kind, Plan
from minicpm_cli.engine.sequence import Sequence

MOVING = ("positions", "slots", "kv_len")


class DecodeLayout:
    """Places in a buffer for decode steps of up to `rows` sequences; each step is padded to some `count` of them.

    First what a step leaves on the device: the tokens drawn, int64, and the peaks of their scores, float32 [rows]. Then
    the step's arrays, which end where its page table begins, so that a step is one stretch of bytes; the table's place
    does not depend on the count. A row's token is element `source` of the whole buffer as int64: one drawn by the step
    before, or one of `ids`, which are the first of the arrays.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = -(-rows // 4) * 4, columns
        self.drawn = Layout({"drawn": (np.int64, self.rows), "peak": (np.float32, self.rows)})
        start = Layout(_arrays(self.rows), self.drawn.stop).stop
        self.table = Layout({"page_table": (np.int32, (self.rows, columns))}, start)
        self._steps: dict[int, tuple[Layout, slice]] = {}

    @property
    def nbytes(self) -> int:
        return self.table.stop

    def step(self, count: int) -> tuple[Layout, slice]:
        """The arrays of a step of `count` rows, and the bytes that it sends: those and its rows of the table."""
        if count not in self._steps:
            arrays = Layout(_arrays(count), self.table.start - Layout(_arrays(count)).stop)
            self._steps[count] = arrays, slice(arrays.start, self.table.start + 4 * count * self.columns)
        return self._steps[count]


def _arrays(count: int) -> dict[str, tuple[Any, Shape]]:
    wide = dict.fromkeys(("ids", "positions", "slots", "source"), (np.int64, count))
    return {**wide, "kv_len": (np.int32, count), **{name: (kind, count) for name, kind in ROW.items()}}


class DecodeHost:
    """The host's side of decode steps, filled for one step after the other; what has not changed is not written again.

    At batch 64 that is the difference between 0.2 and 0.5 ms.
    """

    def __init__(self, layout: DecodeLayout, page_size: int, penalties: Penalties, *, pinned: bool) -> None:
        self.layout, self.page_size, self.penalties = layout, page_size, penalties
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.table = layout.table.host(self.buffer)["page_table"]
        self._held: list[Sequence | None] = [None] * layout.rows  # whose pages each row of the table holds
        self._versions = [0] * layout.rows
        self._drawn: tuple[int, list[Sequence]] = 0, []  # whose draws the arrays for so many rows describe
        self._first = np.zeros(layout.rows, np.int64)  # positions of their first answers
        self._rows = np.arange(layout.rows)
        self._places: dict[int, tuple[Arrays, int, Tensor]] = {}
        self._before: Continued | None = None  # the step that the arrays are of, if it is one of those
        self._moving: list[NDArray[Any]] = []  # what of them is one more in each step
        self._own = False  # whether each row's token is the one that the same row draws in the step before

    def fill(self, plan: Plan, count: int, kind: Kind) -> Tensor:
        """The bytes to send. Rows beyond the plan's write to the dummy page and read one token of it."""
        host, first, sent = self._place(count)
        before, self._before = self._before, None
        if not isinstance(plan, Continued):
            self._fill(plan, host, count, first, kind)
            return sent
        if before is not None and before.lockstep is plan.lockstep:
            self._advance(plan, plan.number - before.number, host, first)
        else:
            self._fill(plan, host, count, first, kind)
            moving = MOVING if kind in ("greedy", "hosted") else (*MOVING, "index")
            self._moving = [host[name][: plan.rows] for name in moving]
        self._before = plan
        return sent

    def _place(self, count: int) -> tuple[Arrays, int, Tensor]:
        """The arrays of a step of so many rows, where in the buffer its first id is, and the bytes that it sends."""
        if count not in self._places:
            arrays, span = self.layout.step(count)
            self._places[count] = arrays.host(self.buffer), arrays.start // 8, self.buffer[span]
        return self._places[count]

    def _fill(self, plan: Plan, host: Arrays, count: int, first: int, kind: Kind) -> None:
        if count != self._drawn[0]:
            self._drawn = count, []  # the arrays of another count lie elsewhere, over these
        self._fill_table(plan.sampled, count)
        self._fill_ids(host, plan.chunks, first)
        self._fill_slots(host, [chunk.start for chunk in plan.chunks])
        if kind not in ("greedy", "hosted"):
            self._fill_draws(host, plan.sampled, count)

    def _advance(self, plan: Continued, places: int, host: Arrays, first: int) -> None:
        """Over the arrays of an earlier step of the same rows: a step is so many places further."""
        used, seq = plan.rows, plan.sampled[0]
        for moving in self._moving:
            moving += places
        for number in range(plan.number - places + 1, plan.number + 1):
            for row in plan.lockstep.turning(number):
                self._turn(host, plan.sampled[row], row, plan.lockstep.first[row] + number, plan.number - number)
        if plan.lockstep.first[0] + plan.number < len(seq.tokens):
            self._fill_ids(host, plan.chunks, first)
        elif not self._own:
            host["source"][:used] = self._rows[:used]
            self._own = True

    def _turn(self, host: Arrays, seq: Sequence, row: int, place: int, further: int) -> None:
        """A row has come to the first place of a page, or to one a little further."""
        column = place // self.page_size
        page = self.table[row, column] = seq.pages[column]
        host["slots"][row] = page * self.page_size + further
        self._versions[row] = seq.version

    def _fill_table(self, seqs: list[Sequence], count: int) -> None:
        held, versions = self._held, self._versions
        for row, seq in enumerate(seqs):
            if held[row] is not seq or versions[row] != seq.version:
                self.table[row, : len(seq.pages)] = np.frombuffer(seq.pages, np.int32)
                held[row], versions[row] = seq, seq.version
        for row in range(len(seqs), count):
            if held[row] is not None:
                self.table[row, 0], held[row] = DUMMY, None

    def _fill_ids(self, host: Arrays, chunks: list[Chunk], first: int) -> None:
        """Tokens in flight come from the row that draws them, others from `ids`."""
        used, source, self._own = len(chunks), host["source"], False
        source[:used] = [seq.row if start == len(seq.tokens) and not seq.draft else -1 for seq, start, _, _ in chunks]
        source[used:] = -1
        known = (source < 0).nonzero()[0]
        if len(known):
            host["ids"][known] = [chunks[row].seq.fed(chunks[row].start) if row < used else 0 for row in known]
            source[known] = first + known

    def _fill_slots(self, host: Arrays, starts: list[int]) -> None:
        positions, slots, used = host["positions"], host["slots"], len(starts)
        positions[:used], positions[used:] = starts, 0
        np.add(positions, 1, out=host["kv_len"], casting="unsafe")
        page, offset = np.divmod(positions, self.page_size)
        np.multiply(self.table[self._rows[: len(page)], page], self.page_size, out=slots)
        slots += offset

    def _fill_draws(self, host: Arrays, seqs: list[Sequence], count: int) -> None:
        used, before = len(seqs), self._drawn[1]
        if before != seqs:
            self._drawn = count, seqs
            same = next((row for row, (old, seq) in enumerate(zip(before, seqs, strict=False)) if old is not seq), None)
            first = min(len(before), used) if same is None else same
            fill_draws({name: host[name][first:] for name in ROW}, seqs[first:], self.penalties)
            host["temperature"][used:], host["seat"][used:] = 0, -1
            self._first[first:used] = [seq.prompt_length for seq in seqs[first:]]
        np.subtract(host["positions"][:used], self._first[:used] - 1, out=host["index"][:used])
