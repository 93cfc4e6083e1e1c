"""Adapters on CUDA: merged, or beside packed weights, with steps captured or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters import MLA, write_adapter
from checkpoint_quantized import RECIPES, write_quantized
from checkpoints import checkpoint_config, tensor_shapes, write_checkpoint
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Request, SamplingParams
from steps import KERNELS, all_logits, relative_error

pytestmark = pytest.mark.gpu
TARGETS = {
    "minicpm5-1b": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "minicpm3-4b": MLA,
    "minicpm-moe-8x2b": ("v_proj", "w1", "w2", "gate"),
}
IDS = list(range(5, 60))
# Of bf16 beside float32. fp8 rounds activations to three mantissa bits in every layer: done on a CPU, that alone gives
# 0.08, and 0.13 where routers then choose other experts (0.137 on an H200).
USUAL, FP8, ROUTED_FP8 = 0.05, 0.12, 0.2


def written(folder: Path, family: str, kind: str) -> tuple[Path, Path]:
    """A model and an adapter for it."""
    path = folder / "base"
    if kind in RECIPES:
        write_quantized(path, family, RECIPES[kind])
    else:
        path = write_checkpoint(path, family, fmt="gguf" if kind == "Q4_0" else "safetensors", quant="Q4_0")
    write_adapter(folder / "adapter", tensor_shapes(checkpoint_config(family)), TARGETS[family])
    return path, folder / "adapter"


def error(quick: torch.Tensor, exact: torch.Tensor, family: str) -> float:  # [T, V]
    """Where experts are routed, of the middle row: of two that are nearly equal a router may take the other one."""
    if family != "minicpm-moe-8x2b":
        return relative_error(quick, exact)
    return float(((quick - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def bound(family: str, kind: str) -> float:
    if kind != "fp8":
        return USUAL
    return ROUTED_FP8 if family == "minicpm-moe-8x2b" else FP8


@pytest.mark.parametrize("kind", ["plain", "gptq", "gptq-order", "nf4", "fp8", "Q4_0"])
@pytest.mark.parametrize("family", TARGETS)
def test_logits_are_the_cpu_s(tmp_path: Path, family: str, kind: str) -> None:
    path, adapter = written(tmp_path, family, kind)
    found = Checkpoint.read(path).with_options(LoadOptions(lora=str(adapter)))
    exact = all_logits(found.decoder(torch.device("cpu"), torch.float32), IDS)
    quick = all_logits(found.decoder(torch.device("cuda"), torch.bfloat16), IDS, [40, 1, 1, 13])
    assert error(quick.cpu(), exact, family) < bound(family, kind)


@pytest.mark.parametrize("kind", ["plain", "gptq", "nf4"])
def test_captured_steps_say_the_same(tmp_path: Path, kind: str) -> None:
    path, adapter = written(tmp_path, "minicpm5-1b", kind)
    said = []
    for graphs in (True, False):
        options = LoadOptions(str(path), "cuda", "fp32", ctx=256, max_seqs=4, graphs=graphs, lora=str(adapter))
        llm = LLM.open(options, ModelFiles(str(path), path), cache=KERNELS)
        requests = [Request(str(i), "hello world " * (i + 1), SamplingParams(0.0, max_tokens=24)) for i in range(3)]
        texts = dict.fromkeys([request.id for request in requests], "")
        for event in llm.stream(requests):
            texts[event.id] += event.text
        said.append(texts)
        llm.close()
    assert said[0] == said[1]
