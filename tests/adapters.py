"""Writes adapters as PEFT lays them out, by hand: names and shapes are written down on their own here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
MLA = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    targets: Sequence[str],
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    **keys: Any,
) -> dict[str, Tensor]:
    """Factors for every matrix of `shapes` that ends in one of `targets`; returns B A * alpha / rank in float64."""
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(f".{target}" for target in targets)) and len(shape) == 2:
            a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            b = torch.randn(shape[0], rank, generator=generator) * 0.1
            tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
            deltas[name] = b.double() @ a.double() * alpha / rank
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    write_files(folder, config | {"target_modules": list(targets)} | keys, tensors)
    return deltas


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def set_keys(folder: Path, **keys: Any) -> None:
    """Sets keys of adapter_config.json; None removes one."""
    path = folder / "adapter_config.json"
    raw = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}), encoding="utf-8")


def set_tensors(folder: Path, **tensors: Tensor | None) -> None:
    """Sets tensors of the adapter, dots in the names written as "__"; None removes one."""
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    found: dict[str, Tensor | None] = {**load_file(path)}
    found |= {PREFIX + name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({n: t for n, t in found.items() if t is not None}, path, metadata={"format": "pt"})
