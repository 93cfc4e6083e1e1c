"""Every operation that `minicpm bench kernels` names runs on a GPU, as a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicpm_cli.bench import kernel_cases, kernels
from minicpm_cli.bench.shapes import SHAPES
from minicpm_cli.model.config import ModelConfig

pytestmark = pytest.mark.gpu
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
HEAD_DIM = {"minicpm4-8b": 128}


@pytest.mark.parametrize("shape", ["minicpm-2b", "minicpm3-4b", "minicpm4-8b", "minicpm-moe-8x2b"])
def test_all_of_them_run(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 1e-3)
    monkeypatch.setattr(kernels, "WARM_SECONDS", 1e-3)
    monkeypatch.setattr(kernel_cases, "COLD", 10_000_000)
    raw: dict[str, Any] = dict(SHAPES[shape]) | SMALL | {"rope_scaling": None}
    heads = {} if "kv_lora_rank" in raw else {"head_dim": HEAD_DIM.get(shape, 64)}
    said: list[str] = []
    measured = list(
        kernels.measure_kernels(ModelConfig.from_hf(raw | heads), torch.device("cuda"), torch.bfloat16, said.append)
    )
    assert said == []
    assert {"sampling top-p 0.8, 64 rows", "products w4, 1 rows", "norm, 8192 rows"} <= {k.name for k in measured}
    assert all(min(kernel.rates) > 0 for kernel in measured)
