"""Quantized checkpoints of every format and family compute what their dequantized weights compute."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_quantized import RECIPES, set_config, write_quantized
from minicpm_cli.errors import WeightsError
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


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "packed-4", "nf4", "int8", "fp8"])
def test_the_program_that_wrote_it_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    meant = write_quantized(tmp_path, "minicpm3-4b", RECIPES[name])
    for module in ("auto_gptq", "gptqmodel", "awq", "optimum", "compressed_tensors", "transformers", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, module, None)  # any import of it fails
    assert logits_error(tmp_path, meant) < 1e-5


@pytest.mark.parametrize("fmt", ["sharded", "bin", "bin-sharded"])
@pytest.mark.parametrize("name", ["gptq-order", "nf4", "fp8"])
def test_any_kind_of_file(tmp_path: Path, name: str, fmt: str) -> None:
    meant = write_quantized(tmp_path, "minicpm5-1b", RECIPES[name], fmt=fmt)
    assert logits_error(tmp_path, meant) < 1e-5


@pytest.mark.parametrize("name", ["gptq", "int8", "fp8"])
def test_layers_that_were_left_plain(tmp_path: Path, name: str) -> None:
    plain = ("q_proj", "layers.1.mlp", "kv_b_proj")
    meant = write_quantized(tmp_path / "llama", "minicpm5-1b", RECIPES[name], plain=plain)
    assert logits_error(tmp_path / "llama", meant) < 1e-5
    meant = write_quantized(tmp_path / "mla", "minicpm3-4b", RECIPES[name], plain=plain)
    assert logits_error(tmp_path / "mla", meant) < 1e-5


def test_biases_of_zeros(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, "minicpm5-1b", replace(RECIPES["gptq"], biases=True))
    assert logits_error(tmp_path, meant) < 1e-5


@pytest.mark.parametrize("tie", [True, None])
def test_a_packed_head_beside_a_tied_embedding(tmp_path: Path, tie: bool | None) -> None:
    """A quantizer that unties the two may leave tie_word_embeddings as it was; then the head must be a copy."""
    meant = write_quantized(tmp_path, "minicpm4-0.5b", RECIPES["gptq-head"])
    set_config(tmp_path, tie_word_embeddings=tie)
    untied = replace(config(tmp_path), tie=False)
    assert relative_error(all_logits(load(tmp_path), IDS), all_logits(decoder_of(untied, meant), IDS)) < 1e-5
    if tie:
        file = tmp_path / "model.safetensors"
        state = load_file(file)
        save_file(state | {"lm_head.qweight": state["lm_head.qweight"].flip(0)}, file)
        with pytest.raises(WeightsError, match=r"tie_word_embeddings true.*they differ"):
            load(tmp_path)
