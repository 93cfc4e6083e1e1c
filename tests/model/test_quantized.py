"""Quantized checkpoints of every format and family compute what their dequantized weights compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint_quantized import RECIPES, write_quantized
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.loader import load_model
from steps import all_logits, decoder_of, relative_error

FAMILIES = ("minicpm5-1b", "minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b")
IDS = [1, 20, 33, 300, 7, 7, 250, 12, 99]


def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text())).with_context(64)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(folder, config(folder), torch.device("cpu"), dtype)


def logits_error(folder: Path, meant: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> float:
    return relative_error(all_logits(load(folder, dtype), IDS), all_logits(decoder_of(config(folder), meant), IDS))


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "gptq-head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, family: str, name: str) -> None:
    meant = write_quantized(tmp_path, family, RECIPES[name])
    assert logits_error(tmp_path, meant) < 1e-5


@pytest.mark.parametrize("name", RECIPES)
def test_bf16_is_as_near_as_bf16_is(tmp_path: Path, name: str) -> None:
    meant = write_quantized(tmp_path, "minicpm5-1b", RECIPES[name])
    assert logits_error(tmp_path, meant, torch.bfloat16) < 0.02
