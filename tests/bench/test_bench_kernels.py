"""Operations by name: each runs, counts what it must, and a chain of them is timed a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicpm_cli.bench import kernel_cases, kernels
from minicpm_cli.bench.shapes import SHAPES
from minicpm_cli.kernels import reference
from minicpm_cli.model.config import ModelConfig

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "rope_scaling": None,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "WARM_SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "CPU_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(kernels, "CPU_SIDE", 16)
    monkeypatch.setattr(kernel_cases, "COLD", 1000)
    monkeypatch.setattr(kernel_cases, "TOKENS", 48)
    monkeypatch.setattr(kernel_cases, "LENGTHS", ((1, 33), (3, 20)))
    monkeypatch.setattr(kernel_cases, "PROMPTS", ((1, 24), (2, 16)))


def small(shape: str) -> ModelConfig:
    raw: dict[str, Any] = dict(SHAPES[shape]) | SMALL
    return ModelConfig.from_hf(raw | LATENT if "kv_lora_rank" in raw else raw | {"head_dim": 64})


@pytest.mark.parametrize("shape", ["minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b"])
def test_all_of_them_run(shape: str) -> None:
    said: list[str] = []
    measured = list(kernels.measure_kernels(small(shape), CPU, BF16, said.append))
    names = [kernel.name for kernel in measured]
    assert said == []
    assert len(names) == len(set(names))
    assert {"products w4, 8 rows", "head w8, 1 row", "decode attention fp8, 3 x 20", "norm, 48 rows"} <= set(names)
    assert ("rope and store, 48 rows" in names) == (shape != "minicpm3-4b")
    assert ("experts w4, 64 rows" in names) == (shape == "minicpm-moe-8x2b")
    assert all(min(kernel.rates) > 0 and kernel.limit > 0 for kernel in measured)


def test_what_does_not_run_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: kernel_cases.Sizes) -> list[kernels.Case]:
        raise ImportError("no such kernel")

    monkeypatch.setattr(kernel_cases.Sizes, "norm", broken)
    said: list[str] = []
    names = [kernel.name for kernel in kernels.measure_kernels(small("minicpm-2b"), CPU, BF16, said.append)]
    assert said == ["norm: does not run here (no such kernel)"]
    assert "norm, 48 rows" not in names
    assert "gate, 48 rows" in names


def test_bytes_and_operations_are_those_that_must_be() -> None:
    model = kernel_cases.Sizes(small("minicpm-2b"), CPU, BF16)
    block = [3 * 128 * 128, 128 * 128, 2 * 256 * 128, 256 * 128]
    assert [case.amount for case in model.products(None)] == [2 * sum(block) / 4] * 3
    assert model.prefill_products()[0].amount == 2 * 48 * sum(block) / 4
    assert model.head(None)[0].amount == 2 * 64 * 128
    assert model.decode(None, 3, 20)[0].amount == 3 * 20 * 2 * 2 * 64 * 2
    assert model.decode("int8", 3, 20)[0].amount == 3 * 20 * 2 * 2 * (64 + 2)
    assert model.prefill(2, 16)[0].amount == 2 * (16 * 16 / 2) * 2 * (2 * 64 + 2 * 64)
    assert model.norm()[0].amount == 2 * 48 * 128 * 2
    assert model.gate()[0].amount == 3 * 48 * 256 * 2


def test_a_row_reads_the_active_experts_and_many_rows_read_all() -> None:
    one, eight, many = kernel_cases.Sizes(small("minicpm-moe-8x2b"), CPU, BF16).experts(None)
    router, experts = 2 * 8 * 128, 2 * 8 * 3 * 128 * 256
    assert one.amount == pytest.approx((router + experts) / 4)
    assert eight.amount == pytest.approx(0.9 * experts, rel=0.01)
    assert many.amount == pytest.approx(router + experts)


def test_the_seconds_are_of_one_call() -> None:
    calls: list[str] = []
    run = [lambda: calls.append("a"), lambda: calls.append("b")]
    seconds = kernels.seconds_a_call(run, CPU)
    assert len(seconds) == kernels.SAMPLES
    assert calls[:4] == ["a", "b", "a", "b"]
    assert all(0 < s < 0.01 for s in seconds)


def test_a_batch_reads_its_own_pages() -> None:
    """Against attention over a cache that holds the same sequences elsewhere."""
    cfg = small("minicpm-2b")
    model = kernel_cases.Sizes(cfg, CPU, torch.float32)
    batch, cache, q = kernel_cases.paged_batch(2, 3, 20, CPU), model._cache(2, 20, None), model.random(6, 2, 64)
    out = reference.attend(q, cache, batch, 0.125)
    flat = cache.k.flatten(0, 1)[32 + 16 :][:20], cache.v.flatten(0, 1)[32 + 16 :][:20]  # of the second sequence
    scores = torch.einsum("qhd,khd->hqk", q[3:], flat[0]) * 0.125
    scores = scores.masked_fill(torch.ones(3, 20, dtype=torch.bool).triu(18), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), flat[1])
    assert torch.linalg.vector_norm(out[3:] - expected) <= 1e-5 * torch.linalg.vector_norm(expected)
    assert batch.slots.tolist() == [16 + 17, 16 + 18, 16 + 19, 48 + 17, 48 + 18, 48 + 19]
