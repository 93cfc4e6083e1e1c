"""Steps of single tokens and of prompts together: each goes to its own kernel, and all are as the textbook says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicpm_cli.kernels.batch import apart

pytest.importorskip("triton", reason="the kernels are written in it")
from test_attention_prefill import FP8, HEADS, PAGE, TOLERANCE, dtypes, exact, paged, queries

from minicpm_cli.kernels import gpu, reference
from minicpm_cli.kernels.gpu import Attention
from steps import relative_error

RUNS = [(1, 10), (1, 33), (1, 0), (21, 0), (3, 30), (1, 7)]
SINGLES = 3
MULTI = {name: HEADS[name] for name in ("mha", "gqa", "two parts")}


@pytest.mark.parametrize("codes", [None, torch.int8, FP8])
@pytest.mark.parametrize("shape", MULTI)
def test_mixed_steps(shape: str, codes: torch.dtype | None, kernel_device: str) -> None:
    heads = HEADS[shape]
    for dtype in dtypes(kernel_device):
        cache, batch, values = paged(RUNS, heads, dtype, kernel_device, codes)
        batch, q = apart(batch), queries(batch, heads, dtype)
        out = Attention(torch.device(kernel_device), None).attend(q, cache, batch, 0.2)
        assert relative_error(out, exact(q, values, batch, heads, 0.2)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("shape", "split"), [("mha", True), ("gqa", True), ("mqa", False), ("mla", False)])
def test_few_heads_of_a_key_go_apart(shape: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, seen = HEADS[shape], list[int]()
    cache, batch, _ = paged(RUNS, heads, torch.float16, "cpu", None)

    def prefill(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        seen.append(len(q))
        return q[..., : heads[3]]

    monkeypatch.setattr(gpu, "prefill", prefill)
    attention = Attention(torch.device("cpu"), None)
    monkeypatch.setattr(attention, "decode", lambda q, *_, **__: seen.append(len(q)))
    attention.attend(queries(batch, heads, torch.float16), cache, apart(batch), 0.2)
    tokens = sum(new for new, _ in RUNS)
    assert seen == ([SINGLES, tokens - SINGLES] if split else [tokens])


def test_the_parts_of_a_batch() -> None:
    """The last run with a history ends the second part."""
    runs = [(1, 10), (1, 33), (1, 0), (9, 0), (3, 30), (12, 0), (1, 0)]
    _, batch, _ = paged(runs, HEADS["mha"], torch.float16, "cpu", None)
    singles, later, fresh = apart(batch).parts
    assert (singles.q_lens, singles.max_q, singles.max_kv) == ((1, 1, 1), 1, 34)
    assert (later.q_lens, later.max_q, later.max_kv) == ((9, 3), 9, 33)
    assert (fresh.q_lens, fresh.kv_lens, fresh.max_kv) == ((12, 1), (12, 1), 12)
    assert singles.q_start.tolist() == [0, 1, 2, 3]
    assert later.q_start.tolist() == [0, 9, 12]
    assert fresh.q_start.tolist() == [0, 12, 13]
    for name in ("ids", "positions", "slots", "kv_len", "page_table"):
        whole = torch.cat([getattr(part, name) for part in (singles, later, fresh)])
        assert torch.equal(whole, getattr(batch, name)), name
    assert (singles.page_size, singles.runs + later.runs + fresh.runs) == (PAGE, batch.runs)


@pytest.mark.parametrize("runs", [[(1, 4), (1, 0)], [(5, 0), (1, 3)], [(5, 0), (2, 0)]])
def test_nothing_to_take_apart(runs: list[tuple[int, int]]) -> None:
    _, batch, _ = paged(runs, HEADS["mha"], torch.float16, "cpu", None)
    assert apart(batch).parts == ()


@pytest.mark.parametrize(("codes", "shuffled", "fresh"), [(None, True, True), (None, False, False), (FP8, False, True)])
@pytest.mark.parametrize("runs", [[(21, 0), (3, 0)], [(1, 33), (1, 0), (5, 9), (19, 0), (2, 0)]])
@pytest.mark.parametrize("shape", ["gqa", "two parts"])
def test_fresh_prompts_are_read_where_they_are(
    shape: str,
    runs: list[tuple[int, int]],
    codes: torch.dtype | None,
    shuffled: bool,
    fresh: bool,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, read, dtype = HEADS[shape], list[bool](), torch.float16
    cache, batch, _ = paged(runs, heads, dtype, kernel_device, codes, shuffled)
    prefill = gpu.prefill
    for held in (cache.rows, cache.scales):  # the reference multiplies what nobody stored by 0
        if held is not None:
            held.copy_(held.float().nan_to_num(0.0).to(held.dtype))

    def watched(*arguments: Any, fresh: Any = None, **more: Any) -> torch.Tensor:
        read.append(fresh is not None)
        return prefill(*arguments, fresh=fresh, **more)

    monkeypatch.setattr(gpu, "prefill", watched)
    angles = torch.rand(len(batch.positions), 1, heads[2] // 2).mul(6).to(kernel_device)
    qkv = torch.randn(len(angles), heads[0] + 2 * heads[1], heads[2]).to(dtype).to(kernel_device)
    turn = angles.cos(), angles.sin()
    out = Attention(torch.device(kernel_device), None).rope_attend(
        qkv.clone(), *turn, heads[0], cache, apart(batch), 0.2
    )
    expected = reference.rope_attend(qkv, *turn, heads[0], cache, batch, 0.2)
    assert read == ([False] if len(runs) > 2 else []) + [fresh]
    # The interpreter's fp8 rounds otherwise than torch's.
    assert relative_error(out, expected) < (0.1 if codes and kernel_device == "cpu" else 5e-3)
    assert not out.isnan().any()
