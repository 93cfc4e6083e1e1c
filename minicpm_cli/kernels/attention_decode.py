"""Attention of one new token a sequence over the paged cache, split along the history so that few rows fill the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minicpm_cli.kernels import attention_decode_kernels as kernels
from minicpm_cli.kernels.cache import LayerCache

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

    def __init__(self, device: torch.device, pdl: bool = False) -> None:
        self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self._pdl = pdl

    def __call__(
        self,
        q: Tensor,  # [B, Hq, Dk], the heads of a row together; rows may lie apart
        cache: LayerCache,
        page_table: Tensor,  # [B, P] int32
        kv_len: Tensor,  # [B] int32, at least 1
        scale: float,
        page_size: int,
        tiling: Tiling | None = None,
    ) -> Tensor:  # [B, Hq, Dv]
        """softmax(q k^T * scale) v over each row's kv_len tokens, whatever other rows and the order of blocks."""
        out = torch.empty((*q.shape[:2], cache.v.shape[3]), dtype=q.dtype, device=q.device)
        common = (q, cache, page_table, kv_len, out, scale * math.log2(math.e), page_size)
        if q.shape[1] == cache.k.shape[2]:
            self._multi_head(*common, tiling or multi_head_tiling(q, cache, page_table, page_size))
        else:
            self._grouped(*common, tiling or grouped_tiling(q, cache, page_table, page_size))
        return out

    def _multi_head(
        self,
        q: Tensor,
        cache: LayerCache,
        table: Tensor,
        kv_len: Tensor,
        out: Tensor,
        scale: float,
        page: int,
        t: Tiling,
    ) -> None:
        rows, heads, width = q.shape
        padded = _power_of_two(width)
        assert heads % t.block == 0
        assert t.splits == 1 or rows * heads // t.block <= ARRIVALS
        partials, stats = _parts(out, t.splits)
        kernels.multi_head[(heads // t.block, rows, t.splits)](
            *_operands(q, cache, table, kv_len, out), partials, stats, self._arrivals,
            scale, *_strides(q, cache, table),
            HEADS=heads, D=width, DP=padded, PAGE=page, SCALED=cache.scales is not None,
            BLOCK=t.block, DEPTH=t.depth, LANES=_lanes(t, padded, cache.k.element_size()),
            SPLITS=t.splits, CHUNK=t.chunk, PDL=self._pdl, num_warps=t.warps, **self._launch(),
        )  # fmt: skip

    def _grouped(
        self,
        q: Tensor,
        cache: LayerCache,
        table: Tensor,
        kv_len: Tensor,
        out: Tensor,
        scale: float,
        page: int,
        t: Tiling,
    ) -> None:
        (rows, heads, width), keys = q.shape, cache.k.shape[2]
        group, value = heads // keys, cache.v.shape[3]
        first = 1 << (width.bit_length() - 1)
        shared = cache.rows.shape[1] == keys  # MLA keeps no values of their own
        assert not shared or value == first
        partials, stats = _parts(out, t.splits)
        kernels.grouped[(keys * -(-group // t.block), rows, t.splits)](
            *_operands(q, cache, table, kv_len, out), partials, stats,
            scale, *_strides(q, cache, table),
            GROUP=group, ROWS=t.block, KEYS=keys, D1=first, D2=width - first,
            SHARED=shared, PAGE=page, SCALED=cache.scales is not None,
            STEP=t.step, SPLITS=t.splits, CHUNK=t.chunk, PDL=self._pdl,
            num_warps=t.warps, num_stages=t.stages, **self._launch(),
        )  # fmt: skip
        if t.splits > 1:
            kernels.combine[(heads, rows)](
                partials, stats, kv_len, out, HEADS=heads, D=value, DP=_power_of_two(value),
                STEP=t.step, SPLITS=t.splits, CHUNK=t.chunk, PDL=self._pdl, num_warps=4, **self._launch(),
            )  # fmt: skip

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._pdl else {}


def multi_head_tiling(q: Tensor, cache: LayerCache, page_table: Tensor, page_size: int) -> Tiling:
    """Four heads a program where they divide; two programs or more for each multiprocessor, of 16 tokens at least."""
    rows, heads = q.shape[:2]
    block = math.gcd(heads, 4)
    depth = 2 if cache.k.element_size() == 1 else 4
    splits, chunk = split_count(rows * heads // block, page_table.shape[1] * page_size)
    return Tiling(warps=4, splits=splits, chunk=chunk, block=block, depth=depth)


def grouped_tiling(q: Tensor, cache: LayerCache, page_table: Tensor, page_size: int) -> Tiling:
    rows, keys = len(q), cache.k.shape[2]
    splits, chunk = split_count(rows * keys, page_table.shape[1] * page_size)
    return Tiling(warps=4, splits=splits, chunk=max(chunk, 64), block=16)


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


def _operands(q: Tensor, cache: LayerCache, table: Tensor, kv_len: Tensor, out: Tensor) -> tuple[Tensor | None, ...]:
    return q, cache.k, cache.v, cache.k_scale, cache.v_scale, table, kv_len, out


def _strides(q: Tensor, cache: LayerCache, table: Tensor) -> tuple[int, int, int, int]:
    """From one row to the next, in elements: queries, the cache, its scales, the page table."""
    scales = 0 if cache.k_scale is None else cache.k_scale.stride(1)
    return q.stride(0), cache.k.stride(1), scales, table.stride(0)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
