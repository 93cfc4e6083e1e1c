"""The shapes count as many weights as the released models have."""

from __future__ import annotations

import math

import pytest
import torch

from minicpm_cli.bench.shapes import SHAPES, raw_config
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.errors import UsageError, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import tensor_shapes

# Parameters of the released checkpoints: exact where a model card or a file size gives them.
RELEASED = {
    "minicpm-2b": (2.725e9, 1e-3),
    "minicpm-1b": (1.36e9, 3e-3),
    "minicpm-moe-8x2b": (13.9e9, 1e-2),
    "minicpm3-4b": (4.07e9, 2e-3),
    "minicpm4-0.5b": (0.434e9, 2e-3),
    "minicpm4-8b": (8.18e9, 2e-3),
    "minicpm5-1b": (1_080_632_832, 0),
    "minicpm5-2b": (2_516_756_480, 0),
}


def config(shape: str) -> ModelConfig:
    return ModelConfig.from_hf(raw_config(shape))


def count(cfg: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(cfg).values())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_the_released_models_weights(shape: str) -> None:
    expected, tolerance = RELEASED[shape]
    assert count(config(shape)) == pytest.approx(expected, rel=tolerance, abs=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_config_counts_the_same_weights(shape: str) -> None:
    assert count(config(shape)) == config(shape).parameters


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="minicpm3-4b"):
        raw_config("gpt-2")


TINY = dict(SHAPES["minicpm5-1b"]) | {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}


def source(seed: int = 0) -> RandomSource:
    cfg = ModelConfig.from_hf(TINY)
    return RandomSource(cfg, device=torch.device("cpu"), dtype=torch.float32, seed=seed)


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    name, shape = "lm_head.weight", (64, 32)
    other = source()
    other.take("model.embed_tokens.weight", shape)
    assert torch.equal(source().take(name, shape), other.take(name, shape))
    assert not torch.equal(source(1).take(name, shape), source().take(name, shape))
    assert not torch.equal(source().take(name, shape), source().take("model.embed_tokens.weight", shape))


def test_random_weights_say_what_does_not_fit() -> None:
    with pytest.raises(WeightsError, match=r"lm_head\.weight is \(64, 32\), the model expects \(65, 32\)"):
        source().take("lm_head.weight", (65, 32))
    with pytest.raises(WeightsError, match=r"no tensor model\.bias"):
        source().shape("model.bias")


def test_random_weights_must_all_be_used() -> None:
    random = source()
    for name in random.names() - {"lm_head.weight"}:
        random.take(name, random.shape(name))
    with pytest.raises(WeightsError, match=r"1 tensors unused, such as lm_head\.weight"):
        random.finish()
    random.ignore("lm_head.weight")
    random.finish()
