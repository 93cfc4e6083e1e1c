"""Attention of one new token a sequence over the paged cache, split along the history so that few rows fill the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels import attention_decode_cuda, attention_decode_grouped
from minicpm_cli.kernels import attention_decode_kernels as kernels
from minicpm_cli.kernels.attention_decode_form import Cut, Stream
from minicpm_cli.kernels.cache import LayerCache

Turn = tuple[Tensor, Tensor]  # cos and sin [B, 1, R/2] float32, contiguous
LOG2_E = math.log2(math.e)
ARRIVALS = 1 << 16  # counters, one for each row and block of heads of a launch with splits


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut. Never from the lengths, which only the device knows in a captured step."""

    warps: int
    splits: int  # programs along a sequence; those without tokens leave at once
    chunk: int  # tokens that a split takes at least
    block: int = 1  # multi-head: heads a program; grouped: query heads a program, padded
    depth: int = 4  # multi-head: tokens that a thread takes in one step
    step: int = 64  # grouped: tokens of one step
    stages: int = 3  # grouped: steps in flight


class DecodeAttention:
    """The operation with its counters, which every launch leaves at zero."""

    def __init__(self, device: torch.device, pdl: bool = False, folder: Path | None = None) -> None:
        """`folder` keeps what NVRTC compiles. `pdl`: launches overlap the end of the kernel before them."""
        self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self._pdl, self._folder = pdl, folder

    def __call__(
        self,
        q: Tensor,  # [B, Hq, Dk], the heads of a row together; rows may lie apart
        cache: LayerCache,
        page_table: Tensor,  # [B, P] int32
        kv_len: Tensor,  # [B] int32, at least 1
        scale: float,
        page_size: int,
        tiling: Tiling | Cut | Stream | None = None,
        sequences: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # [B, Hq, Dv], `out` if it is given
        """softmax(q k^T * scale) v over each row's kv_len tokens, whatever other rows and the order of blocks.

        Rows may be of fewer `sequences`, and then their older tokens may have come with the launch before this one.
        What a row gives is equal to the bit to what it gives in a launch of so many rows.
        """
        history = History(cache, page_table, kv_len, page_size)
        return self._attended(q, q.shape[1], history, scale, None, tiling, sequences, out)

    def rope_store_decode(
        self,
        qkv: Tensor,  # [B, Hq + 2 Hkv, D], contiguous
        turn: Turn,
        cache: LayerCache,
        page_table: Tensor,
        kv_len: Tensor,
        scale: float,
        page_size: int,
        tiling: Tiling | Cut | Stream | None = None,
        sequences: int | None = None,
    ) -> Tensor:  # [B, Hq, D]
        """reference.rope_store for each row's newest token, and its attention, in one launch; qkv stays as it is.

        With `sequences` as above: a row's older tokens must be in the cache already, and may be stored once more.
        """
        heads, history = qkv.shape[1] - 2 * cache.k.shape[2], History(cache, page_table, kv_len, page_size)
        return self._attended(qkv, heads, history, scale, turn, tiling, sequences)

    def _attended(
        self,
        q: Tensor,
        heads: int,
        history: History,
        scale: float,
        turn: Turn | None,
        tiling: Tiling | Cut | Stream | None,
        sequences: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        cache, rows, overlaps = history.cache, sequences or len(q), sequences is None
        tiling = tiling or self._cut(q, rows, heads, history, turn)
        if isinstance(tiling, Cut | Stream):
            table, lengths, size = history.page_table, history.kv_len, history.page_size
            return attention_decode_cuda.decode(
                q, cache, table, lengths, scale, size, turn, tiling, self._folder,
                overlaps=overlaps, out=out, counters=self._arrivals,
            )  # fmt: skip
        if heads == cache.k.shape[2]:
            return self._multi_head(q, history, scale, turn, tiling or multi_head_tiling(rows, history), overlaps, out)
        return self._grouped(q, heads, history, scale, turn, tiling or grouped_tiling(rows, history), overlaps, out)

    def _cut(self, q: Tensor, rows: int, heads: int, history: History, turn: Turn | None) -> Cut | Stream | None:
        """How the CUDA form does it, where that can and is faster."""
        cache, half = history.cache, turn[0].shape[-1] if turn else 0
        keys = cache.k.shape[2]
        if not attention_decode_cuda.worth(rows, heads, keys) or not attention_decode_cuda.supported(q, cache, half):
            return None
        shape = attention_decode_cuda.shape_of(q, cache, heads, history.page_size, half)
        return attention_decode_cuda.choose(rows, shape, history.longest)

    def _multi_head(
        self,
        q: Tensor,
        history: History,
        scale: float,
        turn: Turn | None,
        t: Tiling,
        overlaps: bool,
        out: Tensor | None,
    ) -> Tensor:
        cache = history.cache
        rows, heads, width = len(q), *cache.k.shape[2:]
        pdl = self._pdl and overlaps
        assert heads % t.block == 0
        assert t.splits == 1 or rows * heads // t.block <= ARRIVALS
        padded = _power_of_two(width)
        out = q.new_empty(rows, heads, width) if out is None else out
        kernels.multi_head[(heads // t.block, rows, t.splits)](
            q, *history.tensors, out, *_parts(out, t.splits), self._arrivals, *(turn or (None, None)),
            scale * LOG2_E, q.stride(0), *history.strides,
            HEADS=heads, D=width, DP=padded, PAGE=history.page_size, SCALED=cache.scales is not None,
            BLOCK=t.block, DEPTH=t.depth, LANES=_lanes(t, padded, cache.k.element_size()),
            SPLITS=t.splits, CHUNK=t.chunk, HALF=turn[0].shape[-1] if turn else 0, PDL=pdl,
            num_warps=t.warps, **_launch(pdl),
        )  # fmt: skip
        return out

    def _grouped(
        self,
        q: Tensor,
        heads: int,
        history: History,
        scale: float,
        turn: Turn | None,
        t: Tiling,
        overlaps: bool,
        out: Tensor | None,
    ) -> Tensor:
        cache = history.cache
        rows, (keys, width), value = len(q), cache.k.shape[2:], cache.v.shape[3]
        pdl = self._pdl and overlaps
        group, first = heads // keys, 1 << (width.bit_length() - 1)
        shared = cache.rows.shape[1] == keys  # MLA keeps no values of their own
        assert not shared or value == first
        assert turn is None or width == first, "rotation on the way is for heads of a power of two"
        out = q.new_empty(rows, heads, value) if out is None else out
        partials, stats = _parts(out, t.splits)
        attention_decode_grouped.grouped[(keys * -(-group // t.block), rows, t.splits)](
            q, *history.tensors, out, partials, stats, *(turn or (None, None)),
            scale * LOG2_E, q.stride(0), *history.strides,
            GROUP=group, ROWS=t.block, KEYS=keys, D1=first, D2=width - first,
            SHARED=shared, PAGE=history.page_size, SCALED=cache.scales is not None,
            STEP=t.step, SPLITS=t.splits, CHUNK=t.chunk, HALF=turn[0].shape[-1] if turn else 0, PDL=pdl,
            num_warps=t.warps, num_stages=t.stages, **_launch(pdl),
        )  # fmt: skip
        if t.splits > 1:
            attention_decode_grouped.combine[(heads, rows)](
                partials, stats, history.kv_len, out, HEADS=heads, D=value, DP=_power_of_two(value),
                STEP=t.step, SPLITS=t.splits, CHUNK=t.chunk, PDL=self._pdl, num_warps=1, **_launch(self._pdl),
            )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class History:
    """Where the tokens of each row lie."""

    cache: LayerCache
    page_table: Tensor  # [B, P] int32
    kv_len: Tensor  # [B] int32
    page_size: int

    @property
    def longest(self) -> int:
        return self.page_table.shape[1] * self.page_size

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        cache = self.cache
        return cache.k, cache.v, cache.k_scale, cache.v_scale, self.page_table, self.kv_len

    @property
    def strides(self) -> tuple[int, int, int]:
        """In elements, from one row of the cache to the next, one page of its scales, one row of the page table."""
        scales = 0 if self.cache.k_scale is None else self.cache.k_scale.stride(0)
        return self.cache.k.stride(1), scales, self.page_table.stride(0)


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def multi_head_tiling(rows: int, history: History) -> Tiling:
    """As measured on an H200 with 36 heads of 64: a head a program in up to 8 splits where heads are few, else four.

    The last block of a head puts the splits together alone, 2.4 us for every 8 of them.
    """
    heads = history.cache.k.shape[2]
    if rows * heads < 512:
        splits, chunk = split_count(rows * heads, history.longest)
        return Tiling(warps=4, splits=min(splits, 8), chunk=2 * chunk, block=1)
    block = math.gcd(heads, 4)
    splits, chunk = split_count(rows * heads // block, history.longest)
    if history.cache.k.element_size() == 1:
        return Tiling(warps=4, splits=splits, chunk=chunk, block=block, depth=1)
    return Tiling(warps=2, splits=splits, chunk=chunk, block=block)


def grouped_tiling(rows: int, history: History) -> Tiling:
    """As measured on an H200: two programs for each multiprocessor. Float32 keys in five steps would not fit in the
    99 KB that a block has with compute capability 8.6."""
    programs = rows * history.cache.k.shape[2]
    if history.cache.v.shape[3] < history.cache.k.shape[3]:  # MLA, of one key head
        splits = min(max(256 // rows, 1), 32)
        return Tiling(warps=4, splits=splits, chunk=64, block=16, step=32, stages=3 if splits > 4 else 5)
    splits, chunk = split_count(programs, history.longest)
    stages = 3 if history.cache.k.dtype == torch.float32 else 5
    return Tiling(warps=4, splits=min(splits, -(-256 // programs)), chunk=max(chunk, 64), block=16, stages=stages)


def split_count(programs: int, longest: int) -> tuple[int, int]:
    """Enough splits to fill the GPU, and with long contexts enough that one long row is not left to a few blocks."""
    chunk = 16 if programs < 64 else 128
    wanted = max(-(-2048 // programs), -(-longest // 2048), 1)
    most = max(8192 // programs, 1)
    return min(wanted, most, 32, -(-longest // chunk)), chunk


def _lanes(t: Tiling, padded: int, itemsize: int) -> int:
    """Tokens side by side in a step, with 16 bytes of a head for each thread."""
    return max(t.warps * 32 * 16 // (itemsize * t.block * padded), 1)


def _parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for what each split found: its sums [B, Hq, splits, Dv], its maximum and total [B, Hq, splits, 2]."""
    rows, heads, width = out.shape if splits > 1 else (1, 1, 1)
    shape = (rows, heads, splits, width)
    return out.new_empty(shape, dtype=torch.float32), out.new_empty((*shape[:3], 2), dtype=torch.float32)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
