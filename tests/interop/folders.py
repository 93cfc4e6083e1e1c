"""The same folder opened by this package and by transformers: logits of one sequence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints import write_checkpoint
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.loader import load_model
from steps import all_logits

# Llama's architecture, so that transformers needs no code of the checkpoint.
FAMILY = "minicpm5-1b"
TEXT = "the quick brown fox jumps over the lazy dog and says hello to you. " * 60
IDS = [(7 * i * i + 3 * i) % 400 for i in range(24)]


def write_plain(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    return write_checkpoint(folder, FAMILY, fmt="safetensors", dtype=dtype, **options)


def quantize(plain: Path, out: Path, *args: str) -> Path:
    """`minicpm quantize` on a tiny model, with a calibration text that is as tiny."""
    from minicpm_cli.cli import exit_code
    from minicpm_cli.cli.runtime import Runtime

    text = out.with_name("calibration.txt")
    text.write_text(TEXT)
    options = ["--calib", str(text), "--force", "--no-evaluate", "--device", "cpu"]
    command = ["quantize", str(plain), str(out), *options, *args]
    assert exit_code(command, Runtime()) == 0, " ".join(command)
    return out


def our_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:  # [T, V] float32
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return all_logits(load_model(folder, cfg, torch.device("cpu"), dtype), IDS).float()


def open_theirs(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    """transformers' model; its progress bars and the warnings of the packages behind it are not ours to judge."""
    import transformers

    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def logits_of(model: torch.nn.Module) -> Tensor:  # [T, V] float32
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(torch.tensor([IDS])).logits[0].float()


def their_logits(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return logits_of(open_theirs(folder, dtype, **options))
