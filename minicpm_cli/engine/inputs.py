"""From a plan to the tensors of a step: numpy fills one host buffer, and one copy takes it to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicpm_cli.engine.pages import DUMMY
from minicpm_cli.engine.penalties import Penalties, PenaltyState, rates
from minicpm_cli.engine.plan import Chunk, Plan
from minicpm_cli.engine.sequence import Sequence
from minicpm_cli.kernels.batch import ForwardBatch, apart

Shape = int | tuple[int, int]
Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Tensor]
TORCH: Mapping[Any, torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float64: torch.float64,
    np.float32: torch.float32,
}
WIDE = (np.int64, np.float64)
COLDEST = 1e-30  # float32 has no smaller normal temperature to divide by
HOTTEST = 1e30  # nor a much larger one


@dataclass(frozen=True, slots=True)
class DrawState:
    """How each of S rows is drawn, on the device. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    seed: Tensor  # int64
    index: Tensor  # int64, tokens that the request has generated before
    temperature: Tensor  # float32
    top_p: Tensor  # float64
    min_p: Tensor  # float32
    top_k: Tensor  # int32

    @classmethod
    def of(cls, tensors: Tensors) -> DrawState:
        return cls(**{name: tensors[name] for name in DRAW})


def penalty_state(tensors: Tensors, counts: Tensor) -> PenaltyState:
    return PenaltyState(**{name: tensors[name] for name in PENALTY}, counts=counts)


PENALTY: Mapping[str, Any] = {
    "seat": np.int32,
    "repetition": np.float32,
    "frequency": np.float32,
    "presence": np.float32,
}
DRAW: Mapping[str, Any] = {
    "seed": np.int64,
    "index": np.int64,
    "temperature": np.float32,
    "top_p": np.float64,
    "min_p": np.float32,
    "top_k": np.int32,
}
ROW = {**DRAW, **PENALTY}


class Layout:
    """Where arrays lie in a buffer of bytes, 16-byte aligned one behind the other; the same on host and device."""

    def __init__(self, arrays: Mapping[str, tuple[Any, Shape]], start: int = 0) -> None:
        self.places: dict[str, tuple[slice, Any, Shape]] = {}
        self.start = self.stop = start
        for name, (kind, shape) in arrays.items():
            size = shape if isinstance(shape, int) else shape[0] * shape[1]
            size *= 8 if kind in WIDE else 4
            self.places[name] = slice(self.stop, self.stop + size), kind, shape
            self.stop += -(-size // 16) * 16

    def host(self, buffer: Tensor) -> Arrays:
        whole = buffer.numpy()
        typed = {name: (whole[at].view(kind), shape) for name, (at, kind, shape) in self.places.items()}
        return {name: flat if isinstance(shape, int) else flat.reshape(shape) for name, (flat, shape) in typed.items()}

    def device(self, buffer: Tensor) -> Tensors:
        typed = {name: (buffer[at].view(TORCH[kind]), shape) for name, (at, kind, shape) in self.places.items()}
        return {name: flat if isinstance(shape, int) else flat.view(shape) for name, (flat, shape) in typed.items()}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of any kind on the host. Tokens in flight are taken from what the last step drew on the device."""

    layout: Layout
    buffer: Tensor  # uint8, pinned where the device is a GPU
    page_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    runs: tuple[int, ...]

    def to(self, device: torch.device, drawn: Tensor | None = None) -> tuple[ForwardBatch, Tensors]:
        """The batch, and how its rows are drawn."""
        there = self.layout.device(self.buffer.to(device, non_blocking=True))
        if "flying" in there:
            assert drawn is not None, "a token in flight, and nothing was drawn on the device"
            there["ids"].index_copy_(0, there["flying"], drawn[there["row"]])
        return apart(self.batch(there)), there

    def batch(self, there: Tensors) -> ForwardBatch:
        """Over these tensors, which are as the layout says."""
        names = ("ids", "positions", "slots", "q_start", "kv_len", "page_table", "last")
        return ForwardBatch(
            **{name: there[name] for name in names},
            max_q=max(self.q_lens),
            max_kv=max(self.kv_lens),
            page_size=self.page_size,
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            runs=self.runs,
            drafts=None,
            parts=(),
        )


def build(plan: Plan, page_size: int, *, pinned: bool = False, penalties: Penalties | None = None) -> StepInputs:
    """T tokens of B sequences, S of them sampled; how they are drawn only if the device does it, with `penalties`."""
    chunks, seqs = plan.joined(), plan.sampled
    counts = np.array([chunk.size for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    flying = [i for i, chunk in enumerate(chunks) if chunk.start == len(chunk.seq.tokens)]
    T, B, S, P = int(counts.sum()), len(chunks), len(seqs), max(len(chunk.seq.pages) for chunk in chunks)
    layout = step_layout(T, B, S, P, flying=len(flying), draws=penalties is not None)
    buffer = torch.empty(layout.stop, dtype=torch.uint8, pin_memory=pinned)
    host = layout.host(buffer)
    q_start = host["q_start"]
    q_start[0] = 0
    np.cumsum(counts, out=q_start[1:])
    host["kv_len"][:] = ends = starts + counts
    host["last"][:] = np.arange(T) if plan.extra else q_start[1:][[chunk.sample for chunk in chunks]] - 1
    if flying:
        host["flying"][:], host["row"][:] = q_start[flying], [chunks[i].seq.row for i in flying]
    _fill_table(host["page_table"], chunks)
    _fill_ids(host["ids"], chunks)
    _fill_places(host, starts, counts, page_size)
    if penalties:
        fill_draws(host, seqs, penalties)
        if plan.extra:
            host["index"][:] = [seq.drawn_before(start + size) for seq, start, size, _ in plan.chunks]
    runs = tuple(chunk.seq.run for chunk in chunks)
    return StepInputs(layout, buffer, page_size, tuple(counts.tolist()), tuple(ends.tolist()), runs)


def step_layout(T: int, B: int, S: int, P: int, *, flying: int = 0, draws: bool = True) -> Layout:
    arrays: dict[str, tuple[Any, Shape]] = {
        "ids": (np.int64, T),
        "positions": (np.int64, T),
        "slots": (np.int64, T),
        "last": (np.int64, S),
        "q_start": (np.int32, B + 1),
        "kv_len": (np.int32, B),
        "page_table": (np.int32, (B, P)),
    }
    if flying:
        arrays |= dict.fromkeys(("flying", "row"), (np.int64, flying))
    if draws:
        arrays |= {name: (kind, S) for name, kind in ROW.items()}
    return Layout(arrays)


def fill_draws(host: Arrays, seqs: list[Sequence], penalties: Penalties) -> None:
    """The first rows of the arrays that say how each is drawn: as its sequence's last row, which `length` counts."""
    params, count = [seq.request.params for seq in seqs], len(seqs)
    host["seed"][:count].view(np.uint64)[:] = [seq.request.seed for seq in seqs]
    host["index"][:count] = [seq.drawn_before(seq.length - 1) for seq in seqs]
    host["temperature"][:count] = [0 if seq.greedy else tempered(seq.request.params.temperature) for seq in seqs]
    host["top_p"][:count] = [p.top_p for p in params]
    host["min_p"][:count] = [p.min_p for p in params]
    host["top_k"][:count] = [p.top_k for p in params]
    host["seat"][:count] = penalties.seats(seqs)
    host["repetition"][:count], host["frequency"][:count], host["presence"][:count] = rates(seqs)


def tempered(temperature: float) -> float:
    """As float32 holds it: 0 stays greedy, and nothing else becomes 0 or infinite."""
    return min(max(temperature, COLDEST), HOTTEST) if temperature else 0.0


def _fill_table(table: NDArray[np.int32], chunks: list[Chunk]) -> None:  # [B, P]
    table.fill(DUMMY)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.seq.pages)] = np.frombuffer(chunk.seq.pages, np.int32)


def _fill_ids(ids: NDArray[np.int64], chunks: list[Chunk]) -> None:  # [T]
    """Ids of tokens in flight stay 0 here: the device knows them."""
    at = 0
    for seq, start, count, _ in chunks:
        if count == 1:
            ids[at] = seq.fed(start)
        elif seq.draft:
            ids[at : at + count] = [seq.fed(place) for place in range(start, start + count)]
        else:
            ids[at : at + count] = np.frombuffer(seq.tokens, np.int32, count, start * 4)
        at += count


def _fill_places(host: Arrays, starts: NDArray[np.int64], counts: NDArray[np.int64], page_size: int) -> None:
    """Positions and slots [T] of chunks that begin at `starts` [B]."""
    positions, slots, rows = host["positions"], host["slots"], np.arange(len(counts))
    if len(positions) == len(counts):
        positions[:] = starts
    else:
        rows = np.repeat(rows, counts)
        positions[:] = np.arange(len(positions)) + (starts - host["q_start"][:-1])[rows]
    page, offset = np.divmod(positions, page_size)
    slots[:] = host["page_table"][rows, page].astype(np.int64) * page_size + offset
