"""Decode attention against float64 over the same cached values: odd lengths, shuffled pages, wide tables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.attention_decode_form import Cut, Shape, Stream
from minicpm_cli.kernels.cache import LayerCache, beside, encode
from quant.kernels import targets

attention_decode = pytest.importorskip("minicpm_cli.kernels.attention_decode")
attention_decode_cuda = pytest.importorskip("minicpm_cli.kernels.attention_decode_cuda")

PAGE = 16
LENGTHS = (1, 15, 16, 17, 300)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random_cache(
    pages: int, page: int, heads: int, width: int, value: int, dtype: torch.dtype, device: str
) -> LayerCache:
    """`value` less than `width`: the value is a prefix of the key, as in MLA."""
    shared = value < width
    rows = torch.randn(pages * page, heads if shared else 2 * heads, width)
    scales = None
    if dtype.itemsize == 1:
        rows, scales = encode(rows, dtype)
        scales = scales.to(device)
    rows = rows.to(dtype).to(device)
    whole = rows.view(pages, page, *rows.shape[1:])
    k_scale = v_scale = None
    if scales is not None:
        scales = beside(scales, page)
        k_scale, v_scale = scales[:, :, :heads], scales[:, :, 0 if shared else heads :]
    return LayerCache(
        rows, whole[:, :, :heads], whole[..., :value] if shared else whole[:, :, heads:], scales, k_scale, v_scale
    )


def shuffled_table(lengths: tuple[int, ...], page: int, device: str, spare: int = 5) -> tuple[Tensor, int]:
    """Every sequence's pages scattered over the cache, the padding full of a page whose values would show."""
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed)) + 1
    table = torch.zeros(len(lengths), max(needed) + spare, dtype=torch.int32)
    for row, (count, mine) in enumerate(zip(needed, order.split(needed), strict=True)):
        table[row, :count] = mine
    return table.to(device), sum(needed) + 1


def expected(q: Tensor, cache: LayerCache, table: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """[B, Hq, Dv] by the textbook in float64."""
    out = []
    for row, length in enumerate(lengths):
        pages = table[row].long().cpu()
        k, v = (
            _values(t, s)[pages].flatten(0, 1)[:length] for t, s in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        weights = torch.einsum("hd,lhd->hl", q[row].double().cpu(), k).mul(scale).softmax(-1)
        out.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(out)


def _values(codes: Tensor, scale: Tensor | None) -> Tensor:
    wide = codes.cpu().float().double()
    return wide if scale is None else wide * scale.cpu().double().reshape(*wide.shape[:-1], 1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def attend(
    heads: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    cached: torch.dtype | None = None,
    value: int | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    page: int = PAGE,
    tiling: object = None,
    launches: int = 1,
) -> float:
    if device == "cpu" and dtype == torch.bfloat16 and heads > keys:
        dtype = torch.float16  # the interpreter multiplies bfloat16 matrices as if they were integers
    table, pages = shuffled_table(lengths, page, device)
    cache = random_cache(pages, page, keys, width, value or width, cached or dtype, device)
    fused = torch.randn(len(lengths), heads + 3, width).to(dtype).to(device)
    q, kv_len = fused[:, :heads], torch.tensor(lengths, dtype=torch.int32, device=device)
    decode = attention_decode.DecodeAttention(torch.device(device))
    for _ in range(launches):
        found = decode(q, cache, table, kv_len, width**-0.5, page, tiling)
    return error(found, expected(q, cache, table, lengths, width**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 4, 64), (2, 2, 80), (6, 2, 64), (16, 1, 128), (2, 1, 96)])
def test_heads_and_groups(heads: int, keys: int, width: int, dtype: torch.dtype, kernel_device: str) -> None:
    assert attend(heads, keys, width, dtype, kernel_device) < TOLERANCE[dtype]


@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 4, 64), (2, 2, 128), (8, 1, 64), (3, 1, 80)])
def test_codes_with_scales(heads: int, keys: int, width: int, cached: torch.dtype, kernel_device: str) -> None:
    assert attend(heads, keys, width, torch.float32, kernel_device, cached=cached) < 1e-5
    assert attend(heads, keys, width, torch.bfloat16, kernel_device, cached=cached, lengths=(33,)) < 1e-2


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn])
def test_latent_heads_share_one_key_whose_prefix_is_the_value(cached: torch.dtype, kernel_device: str) -> None:
    assert attend(20, 1, 288, torch.bfloat16, kernel_device, cached=cached, value=256, lengths=(70,)) < 1e-2


@pytest.mark.parametrize("page", [8, 32])
def test_other_page_sizes(page: int, kernel_device: str) -> None:
    assert attend(4, 4, 64, torch.float32, kernel_device, page=page) < 1e-5
    assert attend(8, 1, 64, torch.float32, kernel_device, page=page) < 1e-5


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits(splits: int, kernel_device: str) -> None:
    """The second launch needs the counters as the first found them."""
    alone = attention_decode.Tiling(warps=4, splits=splits, chunk=16, block=4, depth=2)
    assert attend(4, 4, 64, torch.float32, kernel_device, lengths=(1, 70, 100), tiling=alone, launches=2) < 1e-5
    several = attention_decode.Tiling(warps=4, splits=splits, chunk=16, block=16, step=32)
    assert attend(8, 1, 96, torch.float32, kernel_device, lengths=(1, 70, 100), tiling=several) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("heads", "keys", "width", "block", "cluster", "depth", "stages"),
    [
        (4, 4, 64, 4, 1, 1, 4),
        (4, 4, 64, 1, 8, 4, 3),
        (4, 4, 64, 1, 1, 2, 4),
        (4, 4, 80, 2, 4, 2, 3),
        (3, 3, 128, 1, 1, 1, 2),
        (6, 2, 64, 1, 8, 1, 4),
        (20, 1, 128, 1, 2, 1, 2),
        (16, 2, 80, 1, 1, 1, 2),
    ],
)
def test_hopper_kernels(
    heads: int, keys: int, width: int, block: int, cluster: int, depth: int, stages: int, cached: torch.dtype
) -> None:
    cut = Cut(block, cluster, 4, depth, stages)
    dtype = torch.float16 if cached == torch.float16 else torch.bfloat16
    assert attend(heads, keys, width, dtype, "cuda", cached=cached, tiling=cut) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("heads", "width", "cut"),
    [
        (4, 64, Cut(across=2)),
        (8, 64, Cut(across=4, block=2, depth=1)),
        (4, 64, Cut(across=4, cluster=8, depth=4, stages=3)),
        (6, 80, Cut(across=2, cluster=2, depth=4, stages=3)),
        (6, 128, Cut(across=2, block=1, depth=2)),
    ],
)
def test_several_heads_of_a_warp(heads: int, width: int, cut: Cut, cached: torch.dtype) -> None:
    found = attend(heads, heads, width, torch.bfloat16, "cuda", cached=cached, tiling=cut)
    assert found < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("heads", "width", "cut"),
    [
        (4, 64, Stream(3, 3, sides=4)),
        (36, 64, Stream(1, 1, sides=2)),
        (36, 64, Stream(8, 8, sides=2, stages=4, resident=2)),
        (8, 128, Stream(2, 2, sides=2, depth=4, stages=3)),
    ],
)
def test_streams_of_tokens(heads: int, width: int, cut: Stream, cached: torch.dtype) -> None:
    dtype = torch.float16 if cached == torch.float16 else torch.bfloat16
    lengths = (*LENGTHS, *range(20, 700, 40))
    found = attend(heads, heads, width, dtype, "cuda", cached=cached, tiling=cut, lengths=lengths, launches=2)
    assert found < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_row_of_a_stream_is_the_same_whoever_computes_its_parts(cached: torch.dtype) -> None:
    lengths = tuple(1 + 7 * i % 401 for i in range(200))
    table, pages = shuffled_table(lengths, PAGE, "cuda")
    cache = random_cache(pages, PAGE, 36, 64, 64, cached, "cuda")
    q = torch.randn(len(lengths), 36, 64).bfloat16().cuda()
    kv_len = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    decode, cut = (
        attention_decode.DecodeAttention(torch.device("cuda")),
        Stream(3, 3, sides=4 if cached.itemsize == 1 else 2),
    )
    first = decode(q, cache, table, kv_len, 0.125, PAGE, cut)
    for _ in range(5):
        order = torch.randperm(len(lengths), device="cuda")
        again = decode(q[order], cache, table[order], kv_len[order], 0.125, PAGE, cut)
        assert torch.equal(again, first[order])


@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 32])
@pytest.mark.parametrize(("heads", "cached"), [(4, torch.bfloat16), (4, torch.float8_e4m3fn), (12, torch.int8)])
def test_hopper_kernels_on_other_pages(heads: int, cached: torch.dtype, page: int) -> None:
    cut = Cut(1, 2, 4, 4, 3)
    assert attend(heads, 4, 64, torch.bfloat16, "cuda", cached=cached, page=page, tiling=cut) < 1e-2


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("heads", "keys"), [(36, 36), (9, 9), (24, 8), (32, 2), (16, 2)])
@pytest.mark.parametrize("width", [64, 128])
def test_every_choice_fits_a_block(width: int, heads: int, keys: int, coded: bool) -> None:
    for rows in (1, 2, 4, 8, 16, 32, 64, 200):
        for longest in (512, 4096, 131072):
            shape = Shape(width, heads, keys, PAGE, int(coded), False, 0)
            cut = attention_decode_cuda.choose(rows, shape, longest)
            assert cut.shared_bytes(shape) <= targets.SHARED_BYTES
            if isinstance(cut, Stream):
                assert cut.fits(shape)
                continue
            assert heads % cut.block == 0
            assert cut.cluster * cut.warps <= 32


@pytest.mark.parametrize(("rows", "usual"), [(16, 8), (32, 4), (64, 2), (100, 5), (128, 1), (222, 4), (256, 1)])
def test_streams_leave_few_processors_idle(rows: int, usual: int) -> None:
    shape = Shape(64, 36, 36, PAGE, 1, False, 0)
    cut = attention_decode_cuda.choose(rows, shape, 4096)
    assert cut == Stream(usual, max(usual, 2), 4, halves=True)


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (8, 1)])
def test_a_row_is_the_same_whatever_stands_beside_it(heads: int, keys: int, kernel_device: str) -> None:
    lengths = (65, 300, 1, 17)
    table, pages = shuffled_table(lengths, PAGE, kernel_device)
    cache = random_cache(pages, PAGE, keys, 64, 64, torch.float16, kernel_device)
    q = torch.randn(len(lengths), heads, 64).half().to(kernel_device)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=kernel_device)
    decode = attention_decode.DecodeAttention(torch.device(kernel_device))
    together = decode(q, cache, table, kv_len, 0.125, PAGE)
    turned = decode(q.flip(0), cache, table.flip(0), kv_len.flip(0), 0.125, PAGE)
    assert torch.equal(together, turned.flip(0))


@pytest.mark.parametrize(("programs", "longest"), [(9, 512), (9, 4096), (576, 4096), (576, 131072), (100_000, 131072)])
def test_splits_are_bounded(programs: int, longest: int) -> None:
    splits, chunk = attention_decode.split_count(programs, longest)
    assert 1 <= splits <= max(8192 // programs, 1)
    assert splits == 1 or (splits - 1) * chunk < longest


@pytest.mark.parametrize("cached", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("heads", "keys", "width", "rotated"), [(4, 4, 64, 64), (4, 4, 80, 32), (6, 2, 64, 64)])
def test_rotating_and_storing_on_the_way(
    heads: int, keys: int, width: int, rotated: int, cached: torch.dtype, kernel_device: str
) -> None:
    """The cache afterwards, and the attention over it, are those of the operations one after the other."""
    lengths, dtype = (1, 16, 33, 81), torch.float32 if cached == torch.float32 else torch.float16
    table, pages = shuffled_table(lengths, PAGE, kernel_device)
    cache = random_cache(pages, PAGE, keys, width, width, cached, kernel_device)
    qkv = torch.randn(len(lengths), heads + 2 * keys, width).to(dtype).to(kernel_device)
    angles = torch.rand(len(lengths), 1, rotated // 2).mul(6).to(kernel_device)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=kernel_device)
    decode = attention_decode.DecodeAttention(torch.device(kernel_device))
    found = decode.rope_store_decode(qkv, (angles.cos(), angles.sin()), cache, table, kv_len, 0.125, PAGE)
    rows, scales = cache.rows.clone(), None if cache.scales is None else cache.scales.clone()
    last = torch.tensor([n - 1 for n in lengths], device=kernel_device)
    slots = table[range(len(lengths)), last // PAGE].long() * PAGE + last % PAGE
    reference.rope_store(qkv, angles.cos(), angles.sin(), heads, cache, slots)
    eighth = cached == torch.float8_e4m3fn
    cut = kernel_device == "cpu" and eighth  # the interpreter does not round to float8
    stored, wanted = _values(rows, scales), _values(cache.rows, cache.scales)
    assert error(stored[slots.cpu()], wanted[slots.cpu()]) < (
        0.06 if cut else 5e-3 if eighth else 1e-4
    )  # a tie of two codes may go either way
    assert error(found, expected(qkv[:, :heads], cache, table, lengths, 0.125)) < (0.06 if cut else TOLERANCE[dtype])
