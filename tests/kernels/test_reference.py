"""The plain-torch operations against the textbook formulas in float64, sequence by sequence and head by head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.cache import LayerCache, beside, encode
from steps import forward_batch, relative_error

PAGE = 4
CPU = torch.device("cpu")


def textbook(q: Tensor, keys: Tensor, values: Tensor, before: int, scale: float) -> Tensor:
    """softmax(q k^T * scale) v for each new token over everything up to itself; q [n, Hq, D], keys [L, Hkv, D]."""
    out = torch.empty(len(q), q.shape[1], values.shape[2], dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i in range(len(q)):
        for head in range(q.shape[1]):
            seen = keys[: before + i + 1, head // group].double()
            weights = (seen @ q[i, head].double() * scale).softmax(0)
            out[i, head] = weights @ values[: before + i + 1, head // group].double()
    return out


MIXES = {
    "one decode": [(1, 6)],
    "decodes of unequal length": [(1, 0), (1, 9), (1, 3)],
    "a fresh prompt": [(7, 0)],
    "a later chunk": [(5, 6)],
    "decodes, then chunks": [(1, 10), (1, 2), (3, 5), (6, 0)],
    "a longer prompt": [(19, 0)],
    "a longer chunk": [(1, 3), (18, 7)],
}


@pytest.mark.parametrize("heads", [(4, 4, 8, 8), (6, 2, 8, 8), (5, 1, 9, 8)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_equals_the_textbook(
    mix: str, heads: tuple[int, int, int, int], dtype: torch.dtype, consecutive: bool
) -> None:
    hq, hkv, dk, dv = heads
    runs = MIXES[mix]
    generator = torch.Generator().manual_seed(0)
    tables, free = [], iter(range(3, 60) if consecutive else torch.randperm(60, generator=generator).tolist())
    for new, before in runs:
        tables.append([next(free) for _ in range(-(-(new + before) // PAGE))])
    k = torch.randn(60, PAGE, hkv, dk, generator=generator).to(dtype)
    v = torch.randn(60, PAGE, hkv, dv, generator=generator).to(dtype)
    q = torch.randn(sum(n for n, _ in runs), hq, dk, generator=generator).to(dtype)
    batch = forward_batch([([0] * n, before) for n, before in runs], tables, PAGE, CPU)
    out = reference.attend(q, LayerCache(k, k, v), batch, dk**-0.5)
    expected, row = [], 0
    for (new, before), table in zip(runs, tables, strict=True):
        keys, values = (t[table].flatten(0, 1)[: before + new] for t in (k, v))
        expected.append(textbook(q[row : row + new], keys, values, before, dk**-0.5))
        row += new
    assert relative_error(out, torch.cat(expected)) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("consecutive", [False, True])
def test_rows_of_a_short_run_are_those_of_single_steps_to_the_bit(consecutive: bool) -> None:
    """As a step's rows for expected tokens must be; in one product with a mask, five rows or more are not."""
    generator = torch.Generator().manual_seed(2)
    new, before, heads, dim = 9, 300, 9, 64
    count = -(-(new + before) // PAGE)
    table = list(range(count)) if consecutive else torch.randperm(count, generator=generator).tolist()
    k, v = (torch.randn(count, PAGE, 3, dim, generator=generator).bfloat16() for _ in range(2))
    q, cache = torch.randn(new, heads, dim, generator=generator).bfloat16(), LayerCache(k, k, v)
    together = reference.attend(q, cache, forward_batch([([0] * new, before)], [table], PAGE, CPU), dim**-0.5)
    for i in range(new):
        alone = forward_batch([([0], before + i)], [table[: -(-(before + i + 1) // PAGE)]], PAGE, CPU)
        assert torch.equal(reference.attend(q[i : i + 1], cache, alone, dim**-0.5), together[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 77, generator=generator).to(dtype), torch.randn(77, generator=generator).to(dtype)
    d = x.double()
    expected = d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(reference.rms_norm(x, weight, 1e-5), expected) < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_the_last_elements_in_place(dtype: torch.dtype) -> None:
    """As complex numbers: element i with i + R/2 is multiplied by exp(i angle); what comes before stays."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, 10, generator=generator).to(dtype)
    angles = torch.rand(5, 1, 3, generator=generator) * 6
    turned = torch.complex(x[..., 4:7].double(), x[..., 7:].double()) * torch.exp(1j * angles.double())
    expected = torch.cat((x[..., :4].double(), turned.real, turned.imag), -1)
    reference.rope_(x, angles.cos(), angles.sin())
    assert relative_error(x, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


def test_silu_mul() -> None:
    x = torch.randn(4, 14, generator=torch.Generator().manual_seed(3))
    gate, up = x.double()[:, :7], x.double()[:, 7:]
    assert relative_error(reference.silu_mul(x), gate / (1 + (-gate).exp()) * up) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_an_8_bit_cache_gives_back_what_it_was_given(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hkv, d, new = 3, 16, 6
    codes = torch.zeros(5 * PAGE, 2 * hkv, d, dtype=dtype)
    scales = beside(torch.ones(5 * PAGE, 2 * hkv, dtype=torch.float16), PAGE)
    parts = [codes.view(5, PAGE, 2 * hkv, d), scales]
    k, k_scale, v, v_scale = (t[:, :, part] for part in (slice(hkv), slice(hkv, None)) for t in parts)
    cache = LayerCache(codes, k, v, scales, k_scale, v_scale)
    qkv = torch.randn(new, 4 * hkv, d, generator=generator)
    qkv[2] = 0.0
    plain = qkv.clone()
    batch = forward_batch([([0] * new, 0)], [[3, 1]], PAGE, CPU)
    angles = torch.randn(new, 1, 4, generator=generator)
    reference.rope_store(qkv, angles.cos(), angles.sin(), 2 * hkv, cache, batch.slots)
    reference.rope_(plain[:, : 3 * hkv], angles.cos(), angles.sin())
    assert torch.equal(qkv, plain)
    again = codes.float()[batch.slots] * scales.flatten(0, 1)[batch.slots, :, None]
    assert relative_error(again, plain[:, 2 * hkv :]) < (0.01 if dtype == torch.int8 else 0.04)
    out = reference.attend(qkv[:, : 2 * hkv], cache, batch, 0.25)
    expected = textbook(qkv[:, : 2 * hkv], again[:, :hkv], again[:, hkv:], 0, 0.25)
    assert relative_error(out, expected) < 1e-5


def test_fp8_takes_the_best_of_seven_scales() -> None:
    """Each row's error is the least of those that its largest magnitude makes as one of the seven largest codes."""
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(3))
    codes, scale = encode(rows, torch.float8_e4m3fn)
    errors = ((codes.double() * scale.double()[:, None] - rows.double()) ** 2).sum(-1)
    tried = []
    for code in (448, 416, 384, 352, 320, 288, 256):
        one = (rows.abs().amax(-1, keepdim=True) / code).half().float()
        held = (rows / one).clamp(-448, 448).to(torch.float8_e4m3fn).double() * one.double()
        tried.append(((held - rows.double()) ** 2).sum(-1))
    assert torch.allclose(errors, torch.stack(tried).amin(0), rtol=1e-4)
    assert errors.sum() < 0.9 * tried[0].sum()


def test_codes_of_a_row_of_zeros() -> None:
    codes, scale = encode(torch.zeros(2, 3, 4), torch.int8)
    assert not codes.any()
    assert (scale == 1).all()
