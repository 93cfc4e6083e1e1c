"""The inputs of one forward step, prefill and decode alike: variable-length sequences over paged memory."""

from __future__ import annotations

from dataclasses import dataclass

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
