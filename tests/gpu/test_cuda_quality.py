"""Quality measured on a GPU is what the CPU measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.bench.quality import Reader, Remembered, compare, windows
from minicpm_cli.llm.checkpoint import Checkpoint

pytestmark = pytest.mark.gpu


def test_a_comparison_is_the_cpus(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), "minicpm4-0.5b", seed=seed) for seed in (0, 1)]
    parts = windows([(7 * i * i) % 400 for i in range(200)], 64, 32)
    found = []
    for device in map(torch.device, ("cpu", "cuda")):
        ours, theirs = (Checkpoint.read(folder).decoder(device, torch.float32) for folder in folders)
        found.append(compare(Reader(ours), Remembered.of(theirs, parts), parts))
    cpu, cuda = found
    assert (cuda.ppl, cuda.ref_ppl, cuda.kl) == pytest.approx((cpu.ppl, cpu.ref_ppl, cpu.kl), rel=1e-3)
    assert cuda.top1 == pytest.approx(cpu.top1, abs=0.02)
    assert cuda.tokens == cpu.tokens
