"""Our folders against the list of what vLLM checks (vllm_rules.py names its source)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import quantize, write_plain
from safetensors.torch import load_file, save_file
from vllm_rules import problems

W4 = ("--bits", "4", "--group-size", "32")
TAKEN: dict[str, tuple[str, ...]] = {
    "default": ("--method", "gptq"),
    "gptq-w8": ("--method", "gptq", "--bits", "8"),
    "rtn-w4": ("--method", "rtn", *W4),
    "rtn-row": ("--method", "rtn", "--group-size", "-1"),
    "rtn-head": ("--method", "rtn", *W4, "--head-bits", "8"),
    "rtn-skip": ("--method", "rtn", *W4, "--skip", "*.0.self_attn.?_proj", "--skip", "*.down_proj"),
    "rtn-skip-alike": ("--method", "rtn", *W4, "--skip", "*.down_proj"),
    "nf4": ("--method", "nf4"),
    "nf4-skip": ("--method", "nf4", "--skip", "*.down_proj"),
    "int8": ("--method", "int8"),
    "fp8": ("--method", "fp8"),
    "fp8-skip": ("--method", "fp8", "--skip", "*.0.mlp.*"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("vllm") / "plain", torch.bfloat16)


@pytest.mark.parametrize("name", TAKEN)
def test_vllm_takes(name: str, plain: Path, tmp_path: Path) -> None:
    assert problems(quantize(plain, tmp_path / "out", *TAKEN[name])) == []


@pytest.mark.parametrize("args", [("--asym",), ("--skip", "*.q_proj")])
def test_vllm_does_not_take(args: tuple[str, ...], plain: Path, tmp_path: Path) -> None:
    assert problems(quantize(plain, tmp_path / "out", "--method", "rtn", *W4, *args)) != []


def set_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"] |= keys
    path.write_text(json.dumps(raw))


def test_the_list_notices_a_wrong_folder(plain: Path, tmp_path: Path) -> None:
    out = quantize(plain, tmp_path / "out", "--method", "rtn", *W4)
    for keys in ({"sym": False}, {"group_size": 96}, {"bits": 8}, {"dynamic": {"-:.*o_proj": {}}}, {"lm_head": True}):
        kept = (out / "config.json").read_text()
        set_config(out, **keys)
        assert problems(out) != [], keys
        (out / "config.json").write_text(kept)
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.g_idx"
    for changed in ({name: tensors[name].flip(0)}, {"model.norm.scale": torch.zeros(1, dtype=torch.uint8)}):
        save_file(tensors | changed, out / "model.safetensors")
        assert problems(out) != [], list(changed)
