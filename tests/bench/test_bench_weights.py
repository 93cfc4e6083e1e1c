"""The decoder of each family takes every random tensor by the name and shape that the bench gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicpm_cli.bench.shapes import SHAPES
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.loader import build_decoder

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32}


def small(shape: str) -> ModelConfig:
    raw: dict[str, Any] = dict(SHAPES[shape]) | SMALL | {"rope_scaling": None}
    return ModelConfig.from_hf(raw | LATENT if "kv_lora_rank" in raw else raw)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_decoder_takes_every_random_tensor(shape: str) -> None:
    cfg = small(shape)
    source = RandomSource(cfg, device=torch.device("cpu"), dtype=torch.float32)
    assert len(build_decoder(source, cfg, torch.device("cpu"), torch.float32).blocks) == 2
    source.finish()
