"""Frequencies of every scaling rule against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.rope import Rotary, inverse_frequencies

FACTORS = [1.0 + 0.13 * i for i in range(32)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "longrope": {
        "type": "longrope", "original_max_position_embeddings": 4096,
        "short_factor": FACTORS, "long_factor": [2 * f for f in FACTORS],
    },
    "longrope, new key": {
        "rope_type": "longrope", "original_max_position_embeddings": 8192,
        "short_factor": FACTORS, "long_factor": [2 * f for f in FACTORS],
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
}  # fmt: skip


def raw_config(scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 8192, "rope_theta": 50000.0,
        "rope_scaling": scaling,
    }  # fmt: skip


@pytest.mark.parametrize("context", [4096, 8192, 30000])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(name: str, context: int) -> None:
    raw = raw_config(SCALINGS[name])
    cfg = ModelConfig.from_hf(raw)
    theirs = LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    kind = cfg.rope.kind
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=context)
    frequencies, ours = inverse_frequencies(cfg.rope, context)
    torch.testing.assert_close(frequencies, expected, rtol=2e-6, atol=0)
    assert ours == pytest.approx(factor)


def test_cos_and_sin_against_float64() -> None:
    cfg = ModelConfig.from_hf(raw_config(None))
    positions = torch.tensor([0, 1, 17, 4095])
    cos, sin = Rotary(cfg.rope, cfg.context, torch.device("cpu"))(positions)
    exponents = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    angles = positions.double()[:, None] * 50000.0**-exponents
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin(), rtol=0, atol=5e-4)


def test_both_spellings_read_the_same() -> None:
    old = ModelConfig.from_hf(raw_config(SCALINGS["longrope"]))
    scaling = dict(SCALINGS["longrope"])
    scaling["rope_type"] = scaling.pop("type")
    raw = raw_config(None)
    raw["rope_parameters"] = scaling | {"rope_theta": raw.pop("rope_theta")}
    assert ModelConfig.from_hf(raw).rope == old.rope
