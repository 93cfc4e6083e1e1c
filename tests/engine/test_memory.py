"""The memory plan by hand-made arithmetic, and what it says when something does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minicpm_cli.engine.memory import GIB, MemoryOptions, MemoryPlan, plan_memory, survey_memory, workspace_bytes
from minicpm_cli.errors import OutOfMemory
from minicpm_cli.model.config import ModelConfig, RopeConfig

CFG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=1024,
    layers=24,
    heads=16,
    kv_heads=2,
    head_dim=64,
    intermediate=4096,
    vocab=73448,
    eps=1e-5,
    context=32768,
    rope=RopeConfig(64),
    tie=True,
)
KV = 24 * 2 * 2 * 64 * 2  # bytes a token in bf16


def plan(free: float, **options: object) -> MemoryPlan:
    return plan_memory(
        CFG,
        weight_bytes=GIB,
        kv_itemsize=2,
        free_bytes=int(free * GIB),
        options=MemoryOptions(**options),  # type: ignore[arg-type]
    )


def test_a_gpu_gives_the_cache_all_that_is_left() -> None:
    got = plan(16)
    assert (got.context, got.max_seqs, got.kv_per_token) == (32768, 64, KV)
    assert got.budget == int(16 * GIB * 0.9)
    assert got.total <= got.budget < got.total + got.page_size * KV
    assert got.fits
    assert "fits" in got.verdict


def test_the_cache_is_never_larger_than_all_seats_can_use() -> None:
    got = plan(100, max_seqs=2, context=4096)
    assert got.cache_tokens == 2 * 4096
    assert got.pages == 2 * 4096 // 16 + 1


def test_a_small_gpu_opens_a_smaller_context() -> None:
    got = plan(1.4, max_seqs=1, max_batch_tokens=512)
    assert got.context == got.cache_tokens < 32768
    assert got.total <= got.budget


def test_a_context_that_was_asked_for_is_never_shrunk() -> None:
    with pytest.raises(
        OutOfMemory, match=r"a context of 100000 tokens does not fit: .* GiB needed, 1\.80 GiB"
    ) as caught:
        plan(2, context=100_000, max_seqs=1, max_batch_tokens=512)
    assert caught.value.exit_code == 4
    fit = int(str(caught.value).split("a cache of ")[1].split()[0])
    assert plan(2, context=fit, max_seqs=1, max_batch_tokens=512).context == fit
    with pytest.raises(OutOfMemory):
        plan(2, context=fit + 17, max_seqs=1, max_batch_tokens=512)


def test_sequences_that_were_asked_for_are_never_shrunk() -> None:
    with pytest.raises(OutOfMemory, match="5000 sequences at once"):
        plan(4, max_seqs=5000)
    assert plan(4, max_seqs=100).max_seqs == 100


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemory, match=r"the model does not fit.*smaller model"):
        plan(1)
    survey = survey_memory(CFG, weight_bytes=GIB, kv_itemsize=2, free_bytes=GIB, options=MemoryOptions())
    assert not survey.fits
    assert survey.verdict == survey.problem


def test_a_cpu_is_modest() -> None:
    got = plan(16, cpu=True)
    assert (got.context, got.max_seqs) == (8192, 4)
    assert got.cache_tokens == 4 * 8192
    small = plan(4, cpu=True)
    assert small.cache <= 4 * GIB * 0.25 + 16 * KV
    assert small.cache_tokens >= small.context


def test_a_cpu_gives_more_on_request() -> None:
    got = plan(8, cpu=True, context=100_000)
    assert got.context == 100_000
    assert got.cache_tokens >= 100_000


def test_a_step_has_room_for_every_seat() -> None:
    assert plan(40, max_seqs=300, max_batch_tokens=100).max_batch_tokens == 300


def test_workspace_grows_with_tokens_and_seats() -> None:
    assert workspace_bytes(CFG, 1024, 1) > 1024 * 3 * 4096 * 2
    assert workspace_bytes(CFG, 1, 64) > 64 * 73448 * 4 * 3


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, minicpm_cli.engine.memory, minicpm_cli.engine.pages, minicpm_cli.engine.scheduler, "
        "minicpm_cli.engine.stats; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
