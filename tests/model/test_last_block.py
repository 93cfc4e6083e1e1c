"""The last block computes the sampled rows alone: their logits, and all that is cached, are those of the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import FAMILIES, write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.loader import load_model
from steps import KERNELS, forward_batch, relative_error

PAGE, PAGES = 4, 24
RUNS = [([9, 8, 7, 6, 5], 0), ([30 + i for i in range(17)], 0), ([4], 0)]
TABLES = [[3, 5], [1, 2, 9, 8, 7], [11]]
RUNNABLE = [family for family in FAMILIES if family != "minicpm-sala"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", RUNNABLE)
def test_sampled_rows(tmp_path: Path, family: str, device: str) -> None:
    path, there = write_checkpoint(tmp_path, family), torch.device(device)
    decoder = load_model(path, Checkpoint.read(path).cfg.with_context(64), there, torch.float32, kernels=KERNELS)
    whole = forward_batch(RUNS, TABLES, PAGE, there)
    caches = [KVCache.allocate(decoder.cfg, PAGES, PAGE, there, torch.float32) for _ in range(4)]
    with torch.inference_mode():
        expected = decoder.logits(decoder.hidden(whole, caches[0]))
        for kv, last in zip(caches[1:], ([4, 21, 22], [21], []), strict=True):
            rows = torch.tensor(last, dtype=torch.int64, device=there)
            logits = decoder.forward(replace(whole, last=rows), kv)
            assert logits.shape == (len(last), decoder.cfg.vocab)
            if last:
                assert relative_error(logits, expected[rows]) < 1e-5
            for mine, all_of_it in zip(kv.layers, caches[0].layers, strict=True):
                assert torch.equal(mine.rows, all_of_it.rows)
