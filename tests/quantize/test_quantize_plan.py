"""Planned bytes against a calculation by hand, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import checkpoint_config, write_checkpoint
from minicpm_cli.errors import OutOfMemory
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.calibration import Amount
from minicpm_cli.quantize.plan import Machine, make_plan, output_bytes
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.run import plan, quantize
from quantize.quantize_jobs import job_of, silent

MACHINE = Machine("cuda:0", itemsize=2, chunk=4096, free=10**12, host_free=10**12, disk_free=10**12)
SHAPE_2B = checkpoint_config("minicpm-2b", exact=True, layers=40, vocab=122753)


def test_the_bytes_of_a_2b_are_those_of_its_shapes() -> None:
    cfg, recipe = ModelConfig.from_hf(SHAPE_2B), Recipe(calib="a.txt", correction=0)
    made = make_plan(cfg, recipe, Amount(128, 2048), 3072, MACHINE)
    block = 4 * 2304 * 2304 + 3 * 2304 * 5760 + 2 * 2304
    assert made.parts["block"] == 2 * block
    assert made.parts["statistics"] == 4 * 5760**2
    assert made.parts["states"] == (128 * 2048 + 2 * 3072) * 2304 * 2
    assert made.parts["reading"] == 2 * block
    assert made.parts["embedding"] == 122753 * 2304 * 2
    assert made.parts["sampling"] == 0
    assert made.parts["solving"] == 4 * (7 * 5760**2 + 6 * 5760 * 2304)
    assert made.parts["original"] == 0
    assert made.peak < 3 * 10**9
    assert made.problem == ""
    gathering = 2 * made.parts["block"] + made.parts["statistics"] + made.parts["activations"]
    solving = made.parts["block"] + made.parts["statistics"] + made.parts["solving"]
    assert made.peak == int(1.1 * max(gathering, solving, made.parts["head"]))
    assert made.host == int(1.1 * sum(made.parts[name] for name in ("states", "embedding", "reading")))
    corrected = make_plan(cfg, Recipe(calib="a.txt"), Amount(128, 2048), 3072, MACHINE)
    assert corrected.parts["original"] == 2 * block
    assert corrected.parts["statistics"] == 4 * (5760**2 + 2304 * 5760)
    assert corrected.parts["states"] == (2 * 128 * 2048 + 2 * 3072) * 2304 * 2
    assert made.peak < corrected.peak < 3 * 10**9
    assert made.host < corrected.host


def test_its_own_samples_fit_the_same_promise() -> None:
    made = make_plan(ModelConfig.from_hf(SHAPE_2B), Recipe(), Amount(64, 512), 3072, MACHINE)
    assert made.parts["sampling"] > 2 * 10**9
    assert made.peak < 3 * 10**9
    on_cpu = replace(MACHINE, device="cpu", itemsize=4, chunk=2048)
    made = make_plan(ModelConfig.from_hf(SHAPE_2B), Recipe(), Amount(32, 512), 3072, on_cpu)
    assert made.peak < 6 * 10**9
    assert made.parts["kept"] == 32 * 512 * 5760 * 4
    assert (
        make_plan(ModelConfig.from_hf(SHAPE_2B), Recipe(), Amount(64, 512), 0, on_cpu).parts["kept"]
        == 64 * 512 * 2304 * 4
    )


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [
        (Recipe(group=32), 4 + 20 / 32),
        (Recipe(bits=8, group=64), 8 + 24 / 64),
        (Recipe(method="nf4"), 4.5),
    ],
)
def test_the_output_is_counted_as_it_is_stored(recipe: Recipe, bits: float) -> None:
    cfg = ModelConfig.from_hf(SHAPE_2B)
    linear = 40 * (4 * 2304 * 2304 + 3 * 2304 * 5760)
    index = 40 * 4 * (6 * 2304 + 5760) if recipe.scheme.kind == "int" else 0
    plain = 2 * (cfg.parameters - linear)
    size, per_weight = output_bytes(cfg, recipe)
    assert size == pytest.approx(linear * bits / 8 + index + plain, abs=1)
    assert per_weight == pytest.approx(8 * size / cfg.parameters, rel=1e-6)


@pytest.mark.parametrize("recipe", [{}, {"method": "rtn", "bits": 8}, {"method": "nf4"}, {"method": "fp8"}])
def test_the_planned_output_is_that_of_the_folder(tmp_path: Path, recipe: dict[str, object]) -> None:
    job = job_of(write_checkpoint(tmp_path / "model", "minicpm5-1b"), tmp_path / "out", **recipe)
    planned, report = plan(job), quantize(job, silent)
    header = 20_000  # of safetensors, and small tensors of bitsandbytes
    assert planned.output <= report.bytes + 100
    assert report.bytes - planned.output < header
    assert report.peak.planned == planned.peak


def test_what_does_not_fit_is_said_before_the_work(tmp_path: Path) -> None:
    job = job_of(write_checkpoint(tmp_path / "model", "minicpm5-1b"), tmp_path / "out")
    small = replace(job, machine=replace(job.machine, free=1000))
    assert "of memory on cpu are needed, 0.0 MB are free" in plan(small).problem
    with pytest.raises(OutOfMemory, match="--plan shows"):
        quantize(small, silent)
    assert not (tmp_path / "out.partial").exists()


def test_misfits_are_part_of_the_plan() -> None:
    made = make_plan(ModelConfig.from_hf(SHAPE_2B), Recipe(group=96), Amount(1, 16), 0, MACHINE)
    assert made.misfits == ()
    made = make_plan(ModelConfig.from_hf(SHAPE_2B), Recipe(group=512), Amount(1, 16), 0, MACHINE)
    assert len(made.misfits) == 7
    assert "q_proj 2304x2304 (40 layers): 2304 inputs do not divide by 512" in made.misfits[0]


def test_time_grows_with_the_tokens() -> None:
    cfg, machine = ModelConfig.from_hf(SHAPE_2B), replace(MACHINE, rate=4e14)
    short, long = (make_plan(cfg, Recipe(calib="a"), Amount(n, 512), 0, machine).seconds for n in (32, 4096))
    assert 0 < short < long
    assert dict(make_plan(cfg, Recipe(), Amount(1, 16), 0, machine).rows())["time"].startswith("about ")
    assert "time" not in dict(make_plan(cfg, Recipe(), Amount(1, 16), 0, MACHINE).rows())


def test_a_cpus_plan_is_near_what_was_measured() -> None:
    """A block of the 2B with 2,048 tokens of vocabulary, 2x512 tokens, on one thread: 45 s and 2.62 GB."""
    cfg = ModelConfig.from_hf(checkpoint_config("minicpm-2b", exact=True, layers=1, vocab=2048))
    machine = replace(MACHINE, device="cpu", itemsize=4, chunk=2048, rate=104.7e9)
    made = make_plan(cfg, Recipe(calib="a.txt"), Amount(2, 512), 3072, machine)
    assert made.seconds == pytest.approx(45, rel=0.15)
    assert 2.62e9 < made.peak < 1.1 * 2.62e9
