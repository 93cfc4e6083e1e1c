"""The inputs of one forward step, prefill and decode alike: variable-length sequences over paged memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a step of single rows is told when several of them follow each other in one sequence.

    Such a row reads what rows before it store in the same step. What is computed for a row is then what a step of
    `sequences` rows, one of each, computes for it, to the bit.
    """

    sequences: int
    page: Tensor  # [B, 1] int32, the page that each row's key goes to
    filled: Tensor  # [B] int32, tokens of that page up to and with the row's own


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B sequences; S of the sequences are sampled after the step.

    All tensors are on the model's device. The tokens of sequence b are rows q_start[b]:q_start[b+1];
    they are the last ones of its kv_len[b] tokens, whose keys lie in the pages page_table[b].
    """

    ids: Tensor  # [T] int64, token ids
    positions: Tensor  # [T] int64, position of each token in its sequence
    slots: Tensor  # [T] int64, where its key goes: page * page_size + offset
    q_start: Tensor  # [B+1] int32
    kv_len: Tensor  # [B] int32, tokens in the cache after this step
    page_table: Tensor  # [B, P] int32, padded with any valid page
    last: Tensor  # [S] int64, the rows whose logits are wanted
    max_q: int  # the longest run of new tokens; 1: no row reads what another stores, unless there are `drafts`
    max_kv: int  # the longest kv_len
    page_size: int
    q_lens: tuple[int, ...]  # the same lengths on the host, for code that walks sequence by sequence
    kv_lens: tuple[int, ...]
    runs: tuple[int, ...] = ()  # the first page of each sequence whose pages are consecutive, -1 for the others
    drafts: Drafts | None = None
    parts: tuple[ForwardBatch, ...] = ()  # the same, `apart`


def is_fresh(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> bool:
    """Whether all tokens of the sequences are new; one without new tokens does not count."""
    return all(new in (0, length) for new, length in zip(q_lens, kv_lens, strict=True))


def consecutive(runs: tuple[int, ...]) -> bool:
    """Whether the pages of each sequence lie in a row; unknown ones do not."""
    return bool(runs) and min(runs) >= 0


def leading_singles(q_lens: tuple[int, ...]) -> int:
    """How many sequences at the front have one new token each."""
    return next((i for i, length in enumerate(q_lens) if length != 1), len(q_lens))


def apart(batch: ForwardBatch) -> ForwardBatch:
    """The batch, with what different kernels attend to as batches of their own, too, if it is not all alike.

    In order: the single tokens at the front; runs up to the last that has a history; the fresh ones behind it.
    """
    count = len(batch.q_lens)
    singles = leading_singles(batch.q_lens)
    lengths = enumerate(zip(batch.q_lens, batch.kv_lens, strict=True))
    fresh = 1 + max((i for i, (new, length) in lengths if new not in (0, length)), default=-1)
    cuts = sorted({0, singles, max(singles, fresh), count})
    if len(cuts) < 3:
        return batch
    return replace(batch, parts=tuple(_sequences(batch, *part) for part in pairwise(cuts)))


def _sequences(batch: ForwardBatch, first: int, stop: int) -> ForwardBatch:
    """Some of the sequences; none of them sampled."""
    q_lens, kv_lens, before = batch.q_lens[first:stop], batch.kv_lens[first:stop], sum(batch.q_lens[:first])
    rows = slice(before, before + sum(q_lens))
    q_start = batch.q_start[first : stop + 1]
    return replace(
        batch,
        ids=batch.ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        q_start=q_start - before if before else q_start,
        kv_len=batch.kv_len[first:stop],
        page_table=batch.page_table[first:stop],
        last=batch.last[:0],
        max_q=max(q_lens),
        max_kv=max(kv_lens),
        q_lens=q_lens,
        kv_lens=kv_lens,
        runs=batch.runs[first:stop],
    )
