"""The prefill kernel against softmax in float64, over shuffled pages that hold NaN wherever nobody's tokens lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache, beside, encode
from steps import forward_batch, relative_error

pytest.importorskip("triton", reason="the kernel is written in it")
from minicpm_cli.kernels import attention_prefill
from minicpm_cli.kernels.attention_prefill import Tile, prefill, split

PAGE = 4
FP8 = torch.float8_e4m3fn
SMALL = Tile(32, 16, 4, 2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
MIXES = {
    "a fresh prompt": [(39, 0)],
    "a later chunk": [(21, 34)],
    "many": [(1, 10), (37, 0), (1, 0), (3, 30), (16, 16)],
}
Heads = tuple[int, int, int, int]  # Hq, Hkv, Dk, Dv
HEADS: dict[str, Heads] = {
    "mha": (3, 3, 16, 16),
    "gqa": (6, 2, 32, 32),
    "mqa": (5, 1, 8, 8),
    "odd": (2, 1, 24, 24),
    "two parts": (4, 2, 80, 80),
    "mla": (5, 1, 40, 32),
}


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Triton's interpreter multiplies bf16 as the integers that its bits spell."""
    return (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)


def paged(
    runs: list[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    device: str,
    codes: torch.dtype | None,
    shuffled: bool = True,
) -> tuple[LayerCache, ForwardBatch, Tensor]:
    """A cache of random rows for `runs` of (new, before) tokens, its batch, and its values [pages * PAGE, C, Dk]."""
    _, hkv, dk, dv = heads
    lengths = [new + before for new, before in runs]
    count = sum(-(-length // PAGE) for length in lengths) + 3
    generator = torch.Generator().manual_seed(len(runs))
    free = iter(torch.randperm(count, generator=generator).tolist() if shuffled else range(1, count))
    tables = [[next(free) for _ in range(-(-length // PAGE))] for length in lengths]
    rows = torch.full((count * PAGE, 1 if dv < dk else 2 * hkv, dk), torch.nan)
    for table, length in zip(tables, lengths, strict=True):
        at = torch.tensor([table[i // PAGE] * PAGE + i % PAGE for i in range(length)])
        rows[at] = torch.randn(length, *rows.shape[1:], generator=generator)
    batch = forward_batch([([0] * new, before) for new, before in runs], tables, PAGE, torch.device(device))
    rows = rows.to(dtype).to(device)
    if codes is None:
        return _views(rows, None, heads), batch, rows.double()
    held, scales = encode(rows.nan_to_num(0.0) if codes == torch.int8 else rows, codes)
    return _views(held, scales, heads), batch, held.double() * scales.double().unsqueeze(-1)


def _views(rows: Tensor, scales: Tensor | None, heads: Heads) -> LayerCache:
    _, hkv, dk, dv = heads

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        pages = x.view(-1, PAGE, *x.shape[1:])
        return (pages, pages) if dv < dk else (pages[:, :, :hkv], pages[:, :, hkv:])

    k, v = parts(rows)
    if scales is None:
        return LayerCache(rows, k, v[..., :dv])
    paged = beside(scales, PAGE)
    return LayerCache(rows, k, v[..., :dv], paged, *((paged, paged) if dv < dk else paged.split(hkv, 2)))


def exact(q: Tensor, values: Tensor, batch: ForwardBatch, heads: Heads, scale: float) -> Tensor:
    hq, hkv, dk, dv = heads
    rows = values.view(-1, PAGE, *values.shape[1:])
    out, first = [], 0
    for b, (new, length) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        seen = rows[batch.page_table[b].long()].flatten(0, 1)[:length]
        k, v = (seen, seen[..., :dv]) if dv < dk else (seen[:, :hkv], seen[:, hkv:])
        k, v = (t.transpose(0, 1).repeat_interleave(hq // hkv, 0) for t in (k, v))
        scores = q[first : first + new].double().transpose(0, 1) @ k.transpose(1, 2) * scale
        later = torch.ones(new, length, dtype=torch.bool, device=q.device).triu(length - new + 1)
        out.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        first += new
    return torch.cat(out)


def queries(batch: ForwardBatch, heads: Heads, dtype: torch.dtype) -> Tensor:
    """Beside other columns, as they come out of the product."""
    generator = torch.Generator().manual_seed(9)
    wide = torch.randn(sum(batch.q_lens), heads[0] + 2, heads[2], generator=generator)
    return wide.to(dtype).to(batch.q_start.device)[:, : heads[0]]


@pytest.mark.parametrize(
    ("mix", "shape"),
    [*(("many", shape) for shape in HEADS), *((mix, "gqa") for mix in ("a fresh prompt", "a later chunk"))],
)
def test_prefill(mix: str, shape: str, kernel_device: str) -> None:
    heads = HEADS[shape]
    for dtype in dtypes(kernel_device):
        cache, batch, values = paged(MIXES[mix], heads, dtype, kernel_device, None)
        q = queries(batch, heads, dtype)
        out = prefill(q, cache, batch, 0.2, SMALL)
        assert relative_error(out, exact(q, values, batch, heads, 0.2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("codes", [FP8, torch.int8])
@pytest.mark.parametrize("shape", ["gqa", "two parts", "mla"])
def test_prefill_of_an_8_bit_cache(shape: str, codes: torch.dtype, kernel_device: str) -> None:
    heads = HEADS[shape]
    for dtype in dtypes(kernel_device):
        cache, batch, values = paged(MIXES["many"], heads, dtype, kernel_device, codes)
        q = queries(batch, heads, dtype)
        out = prefill(q, cache, batch, 0.2, SMALL)
        assert relative_error(out, exact(q, values, batch, heads, 0.2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_pages_in_a_row_are_read_without_a_table(codes: torch.dtype | None, kernel_device: str) -> None:
    heads = HEADS["two parts"]
    for dtype in dtypes(kernel_device):
        cache, batch, values = paged(MIXES["many"], heads, dtype, kernel_device, codes, shuffled=False)
        assert min(batch.runs) >= 1
        batch.page_table[:, 1:] = 0  # not looked at, then
        q = queries(batch, heads, dtype)
        out = prefill(q, cache, batch, 0.2, SMALL)
        again = forward_batch(
            [([0] * new, before) for new, before in MIXES["many"]],
            [list(range(run, run + -(-length // PAGE))) for run, length in zip(batch.runs, batch.kv_lens, strict=True)],
            PAGE,
            q.device,
        )
        assert relative_error(out, exact(q, values, again, heads, 0.2)) < TOLERANCE[dtype]
        assert torch.equal(out, prefill(q, cache, replace(again, runs=()), 0.2, SMALL))


def test_rows_are_the_same_in_any_company(kernel_device: str) -> None:
    heads, runs = HEADS["gqa"], MIXES["many"]
    cache, batch, _ = paged(runs, heads, torch.float16, kernel_device, None)
    q = queries(batch, heads, torch.float16)
    out, first = prefill(q, cache, batch, 0.2, SMALL), 0
    for b, (new, before) in enumerate(runs):
        table = batch.page_table[b, : -(-(new + before) // PAGE)].tolist()
        alone = forward_batch([([0] * new, before)], [table], PAGE, q.device)
        rows = slice(first, first + new)
        assert torch.equal(out[rows], prefill(q[rows], cache, alone, 0.2, SMALL))
        first += new


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(36, 36, 64, 64), (32, 2, 128, 128), (4, 2, 96, 96), (4, 4, 80, 80), (40, 1, 288, 256)]
)
@pytest.mark.parametrize("codes", [None, FP8, torch.int8])
def test_prefill_at_the_family_s_shapes(heads: Heads, codes: torch.dtype | None) -> None:
    for dtype in dtypes("cuda"):
        cache, batch, values = paged([(200, 0), (1, 300), (77, 130), (5, 0)], heads, dtype, "cuda", codes)
        q = queries(batch, heads, dtype)
        out = prefill(q, cache, batch, 0.1)
        assert relative_error(out, exact(q, values, batch, heads, 0.1)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(36, 36, 64, 64), (32, 2, 128, 128), (4, 2, 96, 96), (40, 1, 288, 256)])
def test_pages_in_a_row_give_the_same_bits(heads: Heads) -> None:
    """Whatever tile each of the two prefers."""
    for dtype in dtypes("cuda"):
        cache, batch, _ = paged([(200, 0), (1, 300), (77, 130), (5, 0)], heads, dtype, "cuda", None, shuffled=False)
        q = queries(batch, heads, dtype)
        assert torch.equal(prefill(q, cache, batch, 0.1), prefill(q, cache, replace(batch, runs=()), 0.1))


@pytest.mark.gpu
def test_more_tiles_than_a_second_dimension_holds() -> None:
    count = 66_000
    cache, batch, values = paged([(1, 0)] * count, (1, 1, 16, 16), torch.float16, "cuda", None)
    out = prefill(queries(batch, (1, 1, 16, 16), torch.float16), cache, batch, 0.2, SMALL)
    own = values[batch.page_table[:, 0].long() * PAGE, 1]
    assert relative_error(out[:, 0], own) < TOLERANCE[torch.float16]


def test_tiles_are_counted_in_the_dimension_that_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grids have room for 2^31 - 1 blocks in the first dimension, and for 65,535 in the others."""
    grids = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(attention_prefill, "_prefill", Launched())
    cache, batch, _ = paged([(33, 0)], HEADS["mla"], torch.float16, "cpu", None)
    prefill(torch.empty(600_000, 5, 40, dtype=torch.float16, device="meta"), cache, batch, 0.2, SMALL)
    assert grids == [(600_000 * 5 // 32 + 1,)]
    assert grids[0][0] > 65_535


def test_split_of_a_head() -> None:
    assert split(64, 64, False) == (64, 64, 0, 0)
    assert split(96, 96, False) == (64, 64, 32, 32)
    assert split(80, 80, False) == (64, 64, 16, 16)
    assert split(80, 80, True) == (80, 128, 0, 0)
    assert split(120, 120, False) == (120, 128, 0, 0)
    assert split(8, 8, False) == (8, 16, 0, 0)
    assert split(288, 256, True) == (256, 256, 32, 32)
    assert split(36, 24, False) == (24, 32, 12, 16)
