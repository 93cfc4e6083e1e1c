"""Tensors that go to a GPU through pinned buffers arrive as they were, whatever their size, type and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.loader import load_model
from minicpm_cli.model.staging import CHUNK, SMALL, Staging

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [0, 1, SMALL // 14, CHUNK // 14, CHUNK // 14 + 1, 40 * CHUNK // 14 + 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_bytes_arrive_unchanged(rows: int, dtype: torch.dtype) -> None:
    stored = torch.randint(-(2**15), 2**15, (rows, 7), dtype=torch.int16).to(dtype)
    staging = Staging(torch.device("cuda", 0), threads=3)
    placed = [staging.place(stored) for _ in range(3)]
    staging.close()
    assert all(p.device.type == "cuda" and p.dtype == dtype and torch.equal(p.cpu(), stored) for p in placed)


def test_other_layouts_go_the_plain_way() -> None:
    stored = torch.randn(700, 900).T
    staging = Staging(torch.device("cuda", 0))
    assert torch.equal(staging.place(stored).cpu(), stored)
    staging.close()


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_what_is_there_already_stays(name: str) -> None:
    stored, staging = torch.randn(700, 900, device=name), Staging(torch.device(name))
    assert torch.equal(staging.place(stored), stored)
    assert staging.place(stored.cpu()).device == stored.device
    staging.close()


def test_a_model_loads_the_same_on_both_devices(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm-1b", fmt="sharded", layers=2, exact=True)
    cfg = Checkpoint.read(path).cfg
    here, there = (load_model(path, cfg, torch.device(d), torch.bfloat16) for d in ("cpu", "cuda:0"))
    for a, b in zip(here.blocks, there.blocks, strict=True):
        assert torch.equal(a.mlp.gate_up.dequantize(), b.mlp.gate_up.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.attention.qkv.dequantize(), b.attention.qkv.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.mlp_norm, b.mlp_norm.cpu())
