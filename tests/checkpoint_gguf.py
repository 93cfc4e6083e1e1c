"""Writes a checkpoint as llama.cpp's converter would, through the `gguf` package's writer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from checkpoint_tokenizers import TinyTokenizer

ARCH = {"LlamaForCausalLM": "llama", "MiniCPMForCausalLM": "minicpm", "MiniCPM3ForCausalLM": "minicpm3"}
FLOATS = {"F32": torch.float32, "F16": torch.float16}


def write_gguf(
    path: Path, config: dict[str, Any], state: dict[str, Tensor], tiny: TinyTokenizer, quant: str = "F16"
) -> Path:
    """Matrices become `quant` (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0), vectors stay F32."""
    arch = ARCH[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config, arch)
    _add_tokens(writer, config, tiny)
    _add_rope(writer, config)
    for name, tensor in _renamed(state, config, arch).items():
        _add_tensor(writer, name, tensor.float(), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "minicpm3":
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    rotary = config.get("qk_rope_head_dim") or config.get("head_dim") or hidden // heads
    writer.add_rope_dimension_count(rotary)
    # llama.cpp assumes 256 for MiniCPM3 and has no key for it: only the small variants, with another base, need one.
    if arch == "minicpm" or (arch == "minicpm3" and config["dim_model_base"] != 256):
        writer.add_embedding_scale(float(config["scale_emb"]))
        writer.add_residual_scale(config["scale_depth"] / math.sqrt(layers))
        writer.add_logit_scale(hidden / config["dim_model_base"])


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    if "long_factor" not in scaling:
        return
    if config["architectures"] == ["MiniCPMForCausalLM"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], np.float32))


def _add_tokens(writer: gguf.GGUFWriter, config: dict[str, Any], tiny: TinyTokenizer) -> None:
    """Ids past the tokenizer's are padded, as the converter does."""
    tokens, size = tiny.tokens(), config["vocab_size"]
    special = set(tiny.specials.values())
    kinds = [_kind(i, token, special) for i, token in enumerate(tokens)]
    ranks = {a + b: -float(i) for i, (a, b) in enumerate(tiny.merges)}
    writer.add_tokenizer_model(tiny.kind)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(len(tokens), size)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * (size - len(tokens)))
    if tiny.kind == "llama":
        writer.add_token_scores([ranks.get(t, -1e6) for t in tokens] + [-1e6] * (size - len(tokens)))
        writer.add_add_space_prefix(True)
    else:
        writer.add_tokenizer_pre("default")
        writer.add_token_merges([f"{a} {b}" for a, b in tiny.merges])
    eos = config["eos_token_id"]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if tiny.im_end is not None:
        writer.add_eot_token_id(tiny.im_end)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tiny.template)


def _kind(index: int, token: str, special: set[int]) -> int:
    if token == "<unk>":
        return int(gguf.TokenType.UNKNOWN)
    if index in special:
        return int(gguf.TokenType.CONTROL)
    return int(gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL)


def _renamed(state: dict[str, Tensor], config: dict[str, Any], arch: str) -> dict[str, Tensor]:
    """Through the gguf package's own table of names; experts are stacked, q and k interleaved."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".experts." in name:
            continue
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        if arch != "minicpm3" and part in heads:
            tensor = interleave(tensor, heads[part])
        target = table.get_name(name, try_suffixes=(".weight",))
        named[target or name.replace("model.layers", "blk").replace("mlp.gate.", "ffn_gate_inp.")] = tensor
    return named | _stacked(state, config)


def _stacked(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    stacks = {}
    for layer in range(config["num_hidden_layers"] if "num_experts" in config else 0):
        for own, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = [state[f"{prefix}.{e}.{own}.weight"] for e in range(config["num_experts"])]
            stacks[f"blk.{layer}.ffn_{theirs}_exps.weight"] = torch.stack(parts)
    return stacks


def interleave(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's row order of q and k: first half and second half of each head take turns."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant if tensor.ndim > 1 else "F32"]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if tensor.shape[-1] % block:  # llama.cpp, too, leaves such a matrix unquantized
        kind = gguf.GGMLQuantizationType.F16
    if kind.name in FLOATS:
        writer.add_tensor(name, tensor.to(FLOATS[kind.name]).contiguous().numpy())
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
