"""A checkpoint of the 2B's shape on one GPU: in five minutes, with less than 3 GB of its memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_tokenizers import write_tokenizer
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import tensor_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS, GPU_BYTES = 300, 3 * 10**9


def random_checkpoint(folder: Path, shape: str, device: torch.device) -> Path:
    """A folder with random weights of a member's true sizes, and a tiny tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir()
    raw = dict(raw_config(shape))
    cfg = ModelConfig.from_hf(raw)
    write_tokenizer(folder, shape)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    source = RandomSource(cfg, device=device, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {n: source.take(n, s).cpu() for n, s in tensor_shapes(cfg).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("calibration", [["--calib", "self"], ["--samples", "128", "--seqlen", "2048"]])
def test_a_2b_in_time_and_memory(tmp_path: Path, calibration: list[str]) -> None:
    source = random_checkpoint(tmp_path / "2b", "minicpm-2b", torch.device("cuda"))
    torch.cuda.empty_cache()
    if "--samples" in calibration:
        (tmp_path / "text.txt").write_text("hello world, the sun and you or they. " * 60_000)
        calibration = [*calibration, "--calib", str(tmp_path / "text.txt")]
    report = tmp_path / "report.json"
    command = ["quantize", str(source), str(tmp_path / "out"), "--report", str(report), *calibration]
    assert exit_code(command, Runtime()) == 0
    found = json.loads(report.read_text())
    print({k: found[k] for k in ("seconds", "peak", "quality", "calibration_tokens")}, file=sys.stderr)
    assert found["seconds"] < SECONDS
    assert found["peak"]["measured"] < GPU_BYTES
    assert found["peak"]["measured"] < found["peak"]["planned"]
    assert found["quality"]["kl"] < 1
