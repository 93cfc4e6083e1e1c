"""What vLLM wants of a quantized folder, written down from its source, since it does not run without a large GPU build.

Source: github.com/vllm-project/vllm, vllm/model_executor as of 2026:
- gptq: layers/quantization/auto_gptq.py (AutoGPTQConfig.from_config, TYPE_MAP, maybe_update_config,
  AutoGPTQLinearMethod.create_weights), layers/quantization/utils/gptq_utils.py (is_layer_gptq_quantized,
  get_dynamic_override), layers/quantization/utils/marlin_utils.py (MARLIN_SUPPORTED_GROUP_SIZES)
- bitsandbytes: layers/quantization/bitsandbytes.py (BitsAndBytesConfig, is_layer_skipped_bnb),
  model_loader/bitsandbytes_loader.py (_quantized_4bit_generator, _quantized_8bit_generator)
- fp8: layers/quantization/compressed_tensors/compressed_tensors.py (_is_fp8_w8a8), its utils.py (should_ignore_layer)
  and schemes/compressed_tensors_w8a8_fp8.py (create_weights)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# Layers that vLLM loads as one, so that all of each have to be packed, or none.
FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
PLAIN_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Folder:
    config: dict[str, Any]  # quantization_config
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Folder:
        tensors: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return cls(json.loads((path / "config.json").read_text())["quantization_config"], tensors)

    def of(self, module: str) -> dict[str, Tensor]:
        """The tensors of one layer by what follows its name."""
        return {n[len(module) + 1 :]: t for n, t in self.tensors.items() if n.startswith(module + ".")}

    @property
    def layers(self) -> list[str]:
        """Linear layers of the blocks, packed or plain."""
        names = {re.match(r"(.*(?:_proj|\.w[123]))\.", name) for name in self.tensors}
        return sorted({found[1] for found in names if found})


def problems(path: Path) -> list[str]:
    """Everything that vLLM would refuse, or compute wrong; empty for a folder that it takes."""
    folder = Folder.read(path)
    checks = {"gptq": _gptq, "bitsandbytes": _bitsandbytes, "compressed-tensors": _fp8}
    return list(checks[folder.config["quant_method"]](folder))


def _fused(folder: Folder, packed: set[str]) -> Iterator[str]:
    for names in FUSED:
        for first in (layer for layer in folder.layers if layer.endswith(names[0])):
            stem = first.removesuffix(names[0])
            if len({stem + name in packed for name in names}) > 1:
                yield f"{stem}: some but not all of {names} are packed"


# ---- gptq


def _gptq(folder: Folder) -> Iterator[str]:
    config = folder.config
    if missing := [key for key in ("bits", "group_size", "desc_act", "sym") if key not in config]:
        yield f"config lacks {missing}"
        return
    if (config["bits"], config["sym"]) not in ((4, True), (8, True)):
        yield f"bits {config['bits']} with sym {config['sym']}: only symmetric 4 and 8 bits"
    if config["group_size"] not in (-1, 32, 64, 128):
        yield f"group_size {config['group_size']}"
    # Without a list of its own, layers with any tensor of another type are taken for packed ones.
    packed = {n.rpartition(".")[0] for n, t in folder.tensors.items() if t.dtype not in PLAIN_TYPES}
    yield from _fused(folder, packed)
    listed = [name for stage in config.get("modules_in_block_to_quantize") or [] for name in stage]
    for module in [*folder.layers, "lm_head"]:
        negative = any(re.match(rule[2:], module) for rule in config.get("dynamic") or {} if rule.startswith("-:"))
        wanted = (any(name in module for name in listed) if listed else module in packed) and not negative
        if wanted != (module in packed) or wanted == (f"{module}.weight" in folder.tensors):
            yield f"{module}: {'packed' if module in packed else 'plain'} tensors, the config says otherwise"
    if ("lm_head" in packed) != bool(config.get("lm_head")):
        yield "lm_head: config and tensors disagree"
    if stray := packed - set(folder.layers) - {"lm_head"}:
        yield f"tensors of other types beside plain layers: {stray}"
    for module in sorted(packed):
        yield from _gptq_layer(config, module, folder.of(module))


def _gptq_layer(config: dict[str, Any], module: str, tensors: dict[str, Tensor]) -> Iterator[str]:
    rules = (
        value for rule, value in (config.get("dynamic") or {}).items() if re.match(rule.removeprefix("+:"), module)
    )
    own = config | next(rules, {})
    bits, codes = own["bits"], tensors.get("qweight", torch.empty(0, 0))
    k, n = codes.shape[0] * 32 // bits, codes.shape[1]
    groups = 1 if own["group_size"] == -1 else k // own["group_size"]
    wanted = {
        "qweight": (torch.int32, (k * bits // 32, n)),
        "qzeros": (torch.int32, (groups, n * bits // 32)),
        "g_idx": (torch.int32, (k,)),
        "scales": (tensors["scales"].dtype if "scales" in tensors else None, (groups, n)),
    }
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != wanted:
        yield f"{module}: {found} instead of {wanted}"
        return
    if tensors["scales"].dtype not in PLAIN_TYPES:
        yield f"{module}: scales are {tensors['scales'].dtype}"
    # Its kernels subtract the middle whatever the zero points say; version 1 of the format stores one less.
    stored = 2 ** (bits - 1) - 1
    if not bool((tensors["qzeros"].contiguous().view(torch.uint8) == (stored * 17 if bits == 4 else stored)).all()):
        yield f"{module}: zero points off the middle, which are not read"
    sizes = tensors["g_idx"].bincount(minlength=groups)
    if not bool((sizes == k // groups).all()):
        yield f"{module}: groups of different sizes"
    natural = torch.arange(k) // (k // groups)
    if not own["desc_act"] and not torch.equal(tensors["g_idx"].long(), natural):
        yield f"{module}: columns in another order, which is not read without desc_act"


# ---- bitsandbytes


def _bitsandbytes(folder: Folder) -> Iterator[str]:
    config = folder.config
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        yield "bnb_4bit_quant_storage is not uint8"
    four = config.get("load_in_4bit", True) and not config.get("load_in_8bit", False)
    mark = ".weight.quant_state.bitsandbytes__nf4" if four else ".SCB"
    packed = {name.removesuffix(mark) for name in folder.tensors if name.endswith(mark)}
    yield from _fused(folder, packed)
    skipped = config.get("llm_int8_skip_modules") or []
    for module in folder.layers:
        parts = module.split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        plain = any(name in parts or name in prefixes for name in skipped)
        if plain == (module in packed):
            yield f"{module}: {'packed' if module in packed else 'plain'} tensors, llm_int8_skip_modules says otherwise"
    for module in sorted(packed):
        yield from (_four_bits if four else _eight_bits)(module, folder.of(module))
    if "lm_head" in packed:
        yield "lm_head is packed; heads are loaded plain"


def _four_bits(module: str, tensors: dict[str, Tensor]) -> Iterator[str]:
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    n, k = state["shape"]
    wanted = {
        "weight": (torch.uint8, (n * k // 2, 1)),
        "weight.absmax": (torch.float32, (n * k // state["blocksize"],)),
        "weight.quant_map": (torch.float32, (16,)),
    }
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if "quant_state" not in name}
    if found != wanted or state["quant_type"] != "nf4":
        yield f"{module}: {found} instead of {wanted}"


def _eight_bits(module: str, tensors: dict[str, Tensor]) -> Iterator[str]:
    n, k = tensors["weight"].shape
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name != "weight_format"}
    wanted = {"weight": (torch.int8, (n, k)), "SCB": (torch.float32, (n,))}
    if found != wanted:
        yield f"{module}: {found} instead of {wanted}"
    if module != module.lower():
        yield f"{module}: its scales are looked up in lower case"


# ---- fp8


def _fp8(folder: Folder) -> Iterator[str]:
    config = folder.config
    (group,) = config["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    form = group.get("format") or config["format"]
    same = {"num_bits": 8, "type": "float", "symmetric": True}
    if form != "float-quantized" or group["targets"] != ["Linear"]:
        yield f"format {form}, targets {group['targets']}"
    for args, more in ((weights, {"strategy": "channel", "dynamic": False}), (inputs, {"dynamic": True})):
        if {key: args.get(key) for key in same | more} != same | more:
            yield f"{args} instead of {same | more}"
    packed = {name.removesuffix(".weight_scale") for name in folder.tensors if name.endswith(".weight_scale")}
    yield from _fused(folder, packed)
    for module in [*folder.layers, "lm_head"]:
        ignored = any(
            re.match(rule[3:], module) if rule.startswith("re:") else rule == module for rule in config["ignore"]
        )
        if f"{module}.weight" in folder.tensors and ignored == (module in packed):
            yield f"{module}: {'packed' if module in packed else 'plain'} tensors, ignore says otherwise"
    for module in sorted(packed):
        tensors = folder.of(module)
        n = tensors["weight"].shape[0]
        scale = tensors["weight_scale"]
        if tensors["weight"].dtype != torch.float8_e4m3fn or tuple(scale.shape) != (n, 1) or len(tensors) != 2:
            yield f"{module}: { {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} }"
        if scale.dtype not in PLAIN_TYPES:
            yield f"{module}: scales are {scale.dtype}"
