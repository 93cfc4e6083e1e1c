"""A step's scores are in the model's type: the kernels that draw read them so, and no float32 copy is made."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints import write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.loader import load_model
from steps import forward_batch


def test_scores_of_a_step(tmp_path: Path) -> None:
    path, device = write_checkpoint(tmp_path, "minicpm-2b"), torch.device("cpu")
    decoder = load_model(path, Checkpoint.read(path).cfg.with_context(64), device, torch.bfloat16)
    batch = forward_batch([([9, 8, 7], 0), ([4], 0)], [[3], [1]], 4, device)
    kv = [KVCache.allocate(decoder.cfg, 5, 4, device, torch.bfloat16) for _ in range(2)]
    with torch.inference_mode():
        scores = decoder.forward(batch, kv[0])
        logits = decoder.logits(decoder.hidden(batch, kv[1], batch.last))
    assert (scores.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(scores.float(), logits)
