"""From a plan to the tensors of a step: numpy fills one host buffer, and one copy takes it to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from minicpm_cli.engine.pages import DUMMY
from minicpm_cli.engine.scheduler import Chunk, Plan
from minicpm_cli.kernels.batch import ForwardBatch


def build(plan: Plan, page_size: int, device: torch.device) -> ForwardBatch:
    """The buffer: ids, positions, slots [T], last [S] as int64; then q_start, kv_len, page_table as int32."""
    chunks = plan.chunks
    counts = np.array([chunk.size for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = starts + counts
    T, B, S = int(counts.sum()), len(chunks), sum(chunk.sample for chunk in chunks)
    P = max(len(chunk.seq.pages) for chunk in chunks)
    split = 8 * (3 * T + S)
    host = torch.empty(split + 4 * (2 * B + 1 + B * P), dtype=torch.uint8, pin_memory=device.type == "cuda")
    wide, narrow = host.numpy()[:split].view(np.int64), host.numpy()[split:].view(np.int32)

    narrow[0] = 0
    q_start = narrow[: B + 1]
    np.cumsum(counts, out=q_start[1:])
    narrow[B + 1 : 2 * B + 1] = ends
    table = narrow[2 * B + 1 :].reshape(B, P)
    _fill_table(table, chunks)
    _fill_ids(wide[:T], chunks)
    _fill_places(wide[T : 3 * T].reshape(2, T), table, q_start, starts, counts, page_size)
    wide[3 * T :] = q_start[1:][[chunk.sample for chunk in chunks]] - 1

    there = host.to(device, non_blocking=True)
    wide_there, narrow_there = there[:split].view(torch.int64), there[split:].view(torch.int32)
    return ForwardBatch(
        ids=wide_there[:T],
        positions=wide_there[T : 2 * T],
        slots=wide_there[2 * T : 3 * T],
        q_start=narrow_there[: B + 1],
        kv_len=narrow_there[B + 1 : 2 * B + 1],
        page_table=narrow_there[2 * B + 1 :].view(B, P),
        last=wide_there[3 * T :],
        max_q=int(counts.max()),
        max_kv=int(ends.max()),
        page_size=page_size,
        q_lens=tuple(counts.tolist()),
        kv_lens=tuple(ends.tolist()),
        runs=tuple(chunk.seq.run for chunk in chunks),
    )


def _fill_table(table: NDArray[np.int32], chunks: list[Chunk]) -> None:  # [B, P]
    table.fill(DUMMY)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.seq.pages)] = np.frombuffer(chunk.seq.pages, np.int32)


def _fill_ids(ids: NDArray[np.int64], chunks: list[Chunk]) -> None:  # [T]
    if len(ids) == len(chunks):
        ids[:] = [chunk.seq.tokens[chunk.start] for chunk in chunks]
        return
    at = 0
    for seq, start, count, _ in chunks:
        ids[at : at + count] = np.frombuffer(seq.tokens, np.int32, count, start * 4)
        at += count


def _fill_places(
    places: NDArray[np.int64],  # [2, T]: positions and slots
    table: NDArray[np.int32],  # [B, P]
    q_start: NDArray[np.int32],  # [B+1]
    starts: NDArray[np.int64],  # [B]
    counts: NDArray[np.int64],  # [B]
    page_size: int,
) -> None:
    positions, slots = places
    if len(positions) == len(counts):
        positions[:], row = starts, np.arange(len(counts))
    else:
        row = np.repeat(np.arange(len(counts)), counts)
        positions[:] = np.arange(len(positions)) + (starts - q_start[:-1])[row]
    page, offset = np.divmod(positions, page_size)
    slots[:] = table[row, page].astype(np.int64) * page_size + offset
