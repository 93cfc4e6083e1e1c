"""Writes tiny quantized checkpoints in the formats of the ecosystem, with the plain weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints import checkpoint_config, is_tied, state_dict, write_checkpoint, write_weights
from quant.formats import awq, compressed, fp8, gptq, int8, nf4
from quant.pack import Packed
from quant.rtn import rtn
from quant.scheme import Scheme

Pack = Callable[[Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Recipe:
    """One way to quantize: `config` is the `quantization_config`, `pack` the tensors of a matrix by their endings."""

    scheme: Scheme
    config: dict[str, Any]
    pack: Pack
    head: bool = False
    biases: bool = field(default=False)


def _gptq(bits: int, group: int, version: str = "gptq", *, head: bool = False, **scheme: bool) -> Recipe:
    made = Scheme("int", bits, group, **scheme)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": made.act_order,
        "sym": made.symmetric,
        "checkpoint_format": version,
        "lm_head": head,
        "true_sequential": True,
        "static_groups": False,
    }
    return Recipe(made, config, lambda packed: gptq.pack(packed, version), head)  # type: ignore[arg-type]


def _awq(group: int) -> Recipe:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Recipe(Scheme("int", 4, group, symmetric=False), config, awq.pack)


def _bitsandbytes(kind: str) -> Recipe:
    four = {
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    eight = {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    config = {"quant_method": "bitsandbytes", **(four if kind == "nf4" else eight)}
    return Recipe(Scheme(kind), config, nf4.pack if kind == "nf4" else int8.pack)  # type: ignore[arg-type]


def _fp8() -> Recipe:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    return Recipe(Scheme("fp8"), config, fp8.pack)


def _compressed(bits: int, group: int, **scheme: bool) -> Recipe:
    made = Scheme("int", bits, group, **scheme)
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "symmetric": made.symmetric,
        "actorder": "group" if made.act_order else None,
        "dynamic": False,
    }
    config_groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return Recipe(made, config, compressed.pack)


RECIPES = {
    "gptq": _gptq(4, 32),
    "gptq-8": _gptq(8, 32),
    "gptq-row": _gptq(4, -1),
    "gptq-order": _gptq(4, 32, act_order=True),
    "gptq-asym": _gptq(4, 32, symmetric=False),
    "gptq-v2": _gptq(4, 32, "gptq_v2", symmetric=False),
    "gptq-v2-order": _gptq(8, 16, "gptq_v2", symmetric=False, act_order=True),
    "gptq-head": _gptq(4, 32, head=True),
    "awq": _awq(32),
    "packed-4": _compressed(4, 32),
    "packed-8-row": _compressed(8, -1),
    "packed-asym-order": _compressed(4, 32, symmetric=False, act_order=True),
    "nf4": _bitsandbytes("nf4"),
    "int8": _bitsandbytes("int8"),
    "fp8": _fp8(),
}


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """A matrix of a block other than the router."""
    return len(shape) == 2 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight")


def quantized(weight: Tensor, scheme: Scheme) -> Packed:
    """Rounded to nearest; with act-order the columns come in an order drawn from the size."""
    if not scheme.act_order:
        return rtn(weight, scheme)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return replace(rtn(weight[:, order], scheme), order=order)  # type: ignore[call-arg]


def quantized_state(
    state: dict[str, Tensor], recipe: Recipe, plain: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the files hold, and the plain float32 weights of the same model. Names that contain one of `plain` stay."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in state.items():
        wanted = is_linear(name, tuple(tensor.shape)) or (recipe.head and name == "lm_head.weight")
        if not wanted or any(part in name for part in plain):
            stored[name], meant[name] = tensor, tensor.float()
            continue
        packed = quantized(tensor, recipe.scheme)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{ending}": t for ending, t in recipe.pack(packed).items()}
        if recipe.biases:
            stored[f"{module}.bias"] = torch.zeros(tensor.shape[0], dtype=torch.float16)
        meant[name] = packed.dequantize()
    return stored, meant


def write_quantized(
    folder: Path, family: str, recipe: Recipe, *, fmt: str = "safetensors", plain: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor]:
    """Writes the folder and returns the plain float32 weights that it stands for."""
    write_checkpoint(folder, family, fmt="safetensors", **options)
    (folder / "model.safetensors").unlink()
    state = state_dict(family, **options)
    if is_tied(checkpoint_config(family, **options)) and not recipe.head:
        del state["lm_head.weight"]
    stored, meant = quantized_state(state, recipe, plain)
    write_weights(folder, stored, fmt)
    set_config(folder, quantization_config=recipe.config)
    return meant


def set_config(folder: Path, **keys: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}, indent=2))
