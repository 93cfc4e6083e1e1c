"""The memory plan by hand-made arithmetic, and what it says when something does not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from minicpm_cli.engine.memory import Demand, MemoryOptions, MemoryPlan, plan_memory, survey_memory, what_would_fit
from minicpm_cli.engine.memory_workspace import Form, step_bytes, workspace
from minicpm_cli.errors import OutOfMemory, UsageError
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
GIB = 2**30
DEMAND = Demand(CFG, weights=GIB, kv_token=KV)


def plan(free: float, **options: object) -> MemoryPlan:
    return plan_memory(DEMAND, int(free * GIB), MemoryOptions(**options))  # type: ignore[arg-type]


def test_a_gpu_gives_the_cache_all_that_is_left() -> None:
    got = plan(16)
    assert (got.context, got.max_seqs, got.kv_per_token) == (32768, 256, KV)
    assert got.budget == int(16 * GIB * 0.9)
    assert got.total <= got.budget < got.total + got.page_size * KV
    assert got.fits
    assert "fits" in got.verdict


def test_seats_are_as_many_as_the_cache_feeds() -> None:
    seats = {got.max_seqs: got for got in map(plan, (2.2, 2.8, 3.3, 16))}
    assert set(seats) == {64, 128, 256}
    for count, got in seats.items():
        assert count == 64 or got.cache_tokens >= count * 512
    assert plan(2.2, max_seqs=200).max_seqs == 200


def test_the_cache_is_never_larger_than_all_seats_can_use() -> None:
    got = plan(100, max_seqs=2, context=4096)
    assert got.cache_tokens == 2 * 4096
    assert got.pages == 2 * 4096 // 16 + 1


def test_a_small_gpu_opens_a_smaller_context() -> None:
    got = plan(1.4, max_seqs=1, max_batch_tokens=512)
    assert got.context == got.cache_tokens < 32768
    assert got.total <= got.budget


def test_a_context_that_was_asked_for_is_never_shrunk() -> None:
    with pytest.raises(OutOfMemory, match=r"a context of 100000 tokens does not fit: .* GB needed, 1\.93 GB") as caught:
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
    survey = survey_memory(DEMAND, GIB, MemoryOptions())
    assert not survey.fits
    assert survey.verdict == survey.problem


def test_the_largest_context_and_batch_are_the_largest() -> None:
    got = plan(3, max_batch_tokens=512)
    assert plan(3, max_batch_tokens=512, max_seqs=1, context=got.largest_context).fits
    with pytest.raises(OutOfMemory):
        plan(3, max_batch_tokens=512, max_seqs=1, context=got.largest_context + 17)
    batch = plan(3, max_batch_tokens=512, context=1024).largest_batch
    assert plan(3, max_batch_tokens=512, context=1024, max_seqs=batch).cache_tokens == batch * 1024
    assert plan(3, max_batch_tokens=512, context=1024, max_seqs=batch + 1).cache_tokens < (batch + 1) * 1024


def test_peaks_add_up() -> None:
    got = plan(16, max_seqs=8, context=2048, graphs=True)
    assert list(got.peaks) == ["load", "capture", "prefill", "decode"]
    assert got.fixed + got.peaks["prefill"] <= got.total
    assert max(got.peaks.values()) == got.total
    assert plan(16, max_seqs=8, context=2048, fixed=GIB).total == got.total - got.phases.capture + GIB
    assert "capture" not in plan(16).peaks


@pytest.mark.parametrize(("tokens", "seqs"), [(8192, 64), (64, 64), (1, 1)])
def test_advice_after_the_memory_ran_out_would_fit(tokens: int, seqs: int) -> None:
    need = step_bytes(CFG, tokens, seqs, DEMAND.form)
    fixed = step_bytes(CFG, 0, 0, DEMAND.form)
    told = what_would_fit(CFG, tokens, seqs, fixed + (need - fixed) * 2 // 3)
    lower = re.search(r"--max-batch-tokens (\d+)", told)
    if tokens == 1:
        assert "Not even one token" in told
        return
    assert lower
    assert step_bytes(CFG, int(lower[1]), min(seqs, int(lower[1])), DEMAND.form) < need
    assert "Not even one token" in what_would_fit(CFG, tokens, seqs, 0)


def test_a_model_that_fits_only_with_small_steps_says_so() -> None:
    survey = survey_memory(DEMAND, int(1.3 * GIB), MemoryOptions())
    assert "--max-seqs 1 --max-batch-tokens 256" in survey.problem
    assert plan(1.3, max_seqs=1, max_batch_tokens=256).fits


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


def test_fewer_tokens_of_a_step_than_sequences_are_refused_not_raised() -> None:
    assert plan(40, max_seqs=100, max_batch_tokens=100).max_batch_tokens == 100
    assert plan(100, max_seqs=9000, context=256).max_batch_tokens == 9000
    for look in (plan_memory, survey_memory):
        with pytest.raises(UsageError, match=r"a step of 100 tokens .* of 300 sequences .* --max-batch-tokens 300 or"):
            look(DEMAND, 40 * GIB, MemoryOptions(max_seqs=300, max_batch_tokens=100))


@pytest.mark.parametrize("cpu", [True, False])
def test_a_step_is_never_larger_than_asked_for_the_sake_of_seats_that_nobody_asked_for(cpu: bool) -> None:
    got = plan(40, max_batch_tokens=3, cpu=cpu)
    assert (got.max_seqs, got.max_batch_tokens) == (3, 3)
    assert plan(40, max_batch_tokens=3, max_seqs=2, cpu=cpu).max_batch_tokens == 3


def test_rows_that_verify_what_is_looked_up_have_room() -> None:
    plain, looking = (plan(16, max_seqs=2, context=1024, lookup=n) for n in (0, 32))
    assert looking.phases.decode == plan(16, max_seqs=66, context=1024).phases.decode > plain.phases.decode
    assert plan(16, max_seqs=200, context=1024, lookup=32).phases == plan(16, max_seqs=200, context=1024).phases


def test_workspace_grows_with_tokens_and_seats() -> None:
    form = DEMAND.form
    assert step_bytes(CFG, 1024, 1, form) > 1024 * 3 * 4096 * 2
    assert step_bytes(CFG, 1, 64, form) > 64 * 73448 * 4 * 3
    few, many = (workspace(CFG, 1, n, form, graphs=True).capture for n in (8, 2000))  # as long as a captured prompt
    assert many - few == (2000 * 2 - 8 * 4) * 73448  # logits in the model's type, of few rows in float32


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, minicpm_cli.engine.memory, minicpm_cli.engine.pages, minicpm_cli.engine.scheduler, "
        "minicpm_cli.engine.stats; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_embedding_and_head_of_float32_have_room_while_they_are_placed() -> None:
    """A model that is little else: what is loaded first takes more than all that runs later."""
    cfg = replace(CFG, layers=1, tie=False)
    ends = 2 * 4 * cfg.vocab * cfg.hidden_size
    demand = Demand(cfg, weights=ends + (32 << 20), kv_token=2 * KV, form=Form(itemsize=4))
    got = survey_memory(
        demand, int(2 * ends + (64 << 20)), MemoryOptions(fraction=1.0, max_seqs=1, max_batch_tokens=16)
    )
    assert got.peaks["load"] == 2 * ends
    assert got.peaks["load"] + got.cache <= got.budget
