"""What config.json says of quantized weights, in the words of the programs that read them. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from minicpm_cli import __version__
from minicpm_cli.quantize.recipe import Recipe

# transformers' list of what is packed in every block; it takes no notice of `dynamic`.
ONE_LIST = "modules_in_block_to_quantize"
BLOCKS = "model.layers."
# GPTQModel reads asymmetric files of version 1 only from writers that are known to handle their zero points: itself
# from 0.9 on. These files hold no zero point below 1, which is what it wants to be sure of.
GPTQMODEL_GROUPS, VLLM_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024), (-1, 32, 64, 128)
_QUANTIZER, _SAFE_FOR_GPTQMODEL = f"minicpm-cli:{__version__}", "gptqmodel:2.0.0"


def quantization_config(
    recipe: Recipe, plain: Sequence[str], packed: Sequence[str] = (), *, head: bool = False
) -> dict[str, Any]:
    """`plain` and `packed` are the blocks' linear layers (names without .weight); `head`: the output head is packed."""
    if recipe.method in ("gptq", "rtn"):
        return _gptq(recipe, plain, packed, head)
    if recipe.method == "fp8":
        return _fp8(plain)
    return _bitsandbytes(recipe, plain)


def unread_by_transformers(config: Mapping[str, Any]) -> str | None:
    """A line on what transformers would silently get wrong. It knows one list of layers for all blocks, and no head."""
    if config["quant_method"] != "gptq":
        return None
    if config["lm_head"]:
        return "transformers does not read an output head in 8 bits (its logits would be noise); GPTQModel does"
    if any(rule.startswith("-:") for rule in config.get("dynamic", {})) and ONE_LIST not in config:
        return "transformers does not read folders whose blocks leave different layers plain; GPTQModel does"
    return None


def unread_group(recipe: Recipe) -> str | None:
    """A line on the programs that refuse files with groups of this size."""
    scheme = recipe.scheme
    groups = {"GPTQModel": GPTQMODEL_GROUPS, "vLLM": VLLM_GROUPS} if scheme.kind == "int" else {}
    names = [name for name, known in groups.items() if scheme.group not in known]
    if not names:
        return None
    return f"{' and '.join(names)} will not read groups of {scheme.group}; 32, 64 and 128 are read everywhere"


def _gptq(recipe: Recipe, plain: Sequence[str], packed: Sequence[str], head: bool) -> dict[str, Any]:
    scheme = recipe.scheme
    quantizers = [_QUANTIZER] if scheme.symmetric else [_QUANTIZER, _SAFE_FOR_GPTQMODEL]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group,
        "desc_act": scheme.act_order,
        "sym": scheme.symmetric,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": recipe.damp,
        "lm_head": head,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": quantizers, "method": recipe.method},
    }
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in plain}
    if head and scheme.bits != 8:
        dynamic["+:^lm_head$"] = {"bits": 8}
    if plain and not head and (names := _same_in_all_blocks(plain, packed)):
        config[ONE_LIST] = [names]
    return config | ({"dynamic": dynamic} if dynamic else {})


def _same_in_all_blocks(plain: Sequence[str], packed: Sequence[str]) -> list[str] | None:
    """The packed names behind "model.layers.N.", where they are the same for every N."""
    split = [name.removeprefix(BLOCKS).partition(".") for name in packed]
    blocks: dict[str, list[str]] = {name.removeprefix(BLOCKS).partition(".")[0]: [] for name in plain}
    for block, _, inner in split:
        blocks.setdefault(block, []).append(inner)
    first, *others = blocks.values()
    return first if all(names == first for names in others) else None


def _bitsandbytes(recipe: Recipe, plain: Sequence[str]) -> dict[str, Any]:
    four = recipe.method == "nf4"
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_skip_modules": ["lm_head", *plain],
    }


def _fp8(plain: Sequence[str]) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight | {"strategy": "channel", "dynamic": False},
                "input_activations": eight | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", *plain],
        "kv_cache_scheme": None,
    }
