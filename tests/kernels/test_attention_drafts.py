"""Several rows of a sequence in one step give, to the bit, what steps of one row after the other give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels.batch import Drafts, ForwardBatch
from minicpm_cli.kernels.cache import LayerCache, beside, encode
from steps import forward_batch

gpu = pytest.importorskip("minicpm_cli.kernels.gpu")

PAGE, SCALE = 16, 0.125
HISTORIES = (0, 15, 40)  # tokens before; the second row of the second sequence begins a page
Heads = tuple[int, int, int]  # Hq, Hkv, D


def paged_cache(pages: int, heads: Heads, dtype: torch.dtype, codes: torch.dtype | None, device: str) -> LayerCache:
    """Random keys and values."""
    _, keys, width = heads
    rows = torch.randn(pages * PAGE, 2 * keys, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    scales = None
    if codes is not None:
        rows, scales = (t.to(device) for t in encode(rows, codes))
    rows = rows.to(device)
    whole = rows.view(pages, PAGE, 2 * keys, width)
    parts = (None, None)
    if scales is not None:
        scales = beside(scales, PAGE)
        parts = (scales[:, :, :keys], scales[:, :, keys:])
    return LayerCache(rows, whole[:, :, :keys], whole[:, :, keys:], scales, *parts)


def single_rows(histories: list[int], tables: list[list[int]], device: str) -> ForwardBatch:
    """A row for each history: the token behind it."""
    return forward_batch([([0], before) for before in histories], tables, PAGE, torch.device(device))


def drafted(batch: ForwardBatch, sequences: int) -> ForwardBatch:
    page = batch.page_table.gather(1, (batch.positions // PAGE)[:, None])
    return replace(batch, drafts=Drafts(sequences, page, (batch.positions % PAGE + 1).int()))


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(
    ("heads", "codes"),
    [((4, 4, 32), None), ((4, 2, 32), None), ((1, 1, 80), None), ((2, 2, 32), torch.int8), ((2, 1, 64), torch.int8)],
)
def test_rows_of_a_draft(heads: Heads, codes: torch.dtype | None, sequences: int, kernel_device: str) -> None:
    check(heads, codes, HISTORIES[-sequences:], 2, torch.float16, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(36, 36, 64), (32, 2, 128), (16, 2, 64), (24, 8, 128)])
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("histories", "rows"), [((2000,), 8), ((37,), 4), ((5, 900), 4), ((1, 2, 3, 700), 2)])
def test_rows_of_a_draft_at_the_family_s_shapes(
    heads: Heads, codes: torch.dtype | None, histories: tuple[int, ...], rows: int
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(heads, codes, histories, rows, dtype, "cuda", repeats=10)


def check(
    heads: Heads,
    codes: torch.dtype | None,
    histories: tuple[int, ...],
    count: int,
    dtype: torch.dtype,
    device: str,
    repeats: int = 1,
) -> None:
    """`count` rows of each sequence, one after the other and then together."""
    needed = [-(-(before + count) // PAGE) for before in histories]
    free = iter(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).add(1).tolist())
    tables = [[next(free) for _ in range(n)] for n in needed]
    cache = paged_cache(sum(needed) + 1, heads, dtype, codes, device)
    every, half = heads[0] + 2 * heads[1], heads[2] // 2
    made = torch.Generator().manual_seed(7)
    qkv = torch.randn(len(histories), count, every, heads[2], generator=made).to(dtype).to(device)
    angles = torch.rand(len(histories), count, 1, half, generator=made).mul(6).to(device)
    attention = gpu.Attention(torch.device(device), None)

    def attend(batch: ForwardBatch, x: Tensor, angle: Tensor) -> Tensor:
        turn = angle.cos().contiguous(), angle.sin().contiguous()
        found: Tensor = attention.rope_attend(x.clone(), *turn, heads[0], cache, batch, SCALE)
        return found

    one_by_one = [
        attend(single_rows([before + i for before in histories], tables, device), qkv[:, i], angles[:, i])
        for i in range(count)
    ]
    wanted, kept = torch.stack(one_by_one, 1).flatten(0, 1), cache.rows.clone()
    together = drafted(
        single_rows(
            [before + i for before in histories for i in range(count)],
            [t for t in tables for _ in range(count)],
            device,
        ),
        len(histories),
    )
    for _ in range(repeats):
        bytes_of = cache.rows.view(torch.uint8)
        bytes_of[together.slots] = bytes_of[together.slots].flip(-1)  # as if they were never stored
        found = attend(together, qkv.flatten(0, 1), angles.flatten(0, 1))
        assert torch.equal(found, wanted)
        assert torch.equal(cache.rows.view(torch.uint8), kept.view(torch.uint8))
