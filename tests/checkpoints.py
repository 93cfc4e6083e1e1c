"""Writes tiny random checkpoints of every family, laid out as the published ones are.

The names, shapes and file formats here are written down on their own, from the published checkpoints; nothing is taken
from the package under test.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_configs import FAMILIES, LAYOUT, config_of, generation_of
from checkpoint_gguf import write_gguf
from checkpoint_tokenizers import tokenizer_of, write_tokenizer

__all__ = ["FAMILIES", "checkpoint_config", "fold", "state_dict", "tensor_shapes", "write_checkpoint"]

FORBIDDEN_CODE = 'raise RuntimeError("code of the checkpoint was imported")\n'


def checkpoint_config(family: str, **options: Any) -> dict[str, Any]:
    """The config.json that `write_checkpoint` writes with the same options (layers, vocab, tie, exact)."""
    return config_of(family, im_end=None if family == "minicpm-sala" else tokenizer_of(family).im_end, **options)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model with this config, by name; the head is listed even where it is tied."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (_attention(config) | _feed_forward(config)).items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], hidden // heads
        parts = {
            "q_a_proj": (q_rank, hidden),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
            "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (heads * (nope + value), kv_rank),
            "o_proj": (hidden, heads * value),
        }
    else:
        dim, kv = config.get("head_dim", hidden // heads), config["num_key_value_heads"]
        parts = {"q_proj": (heads * dim, hidden), "k_proj": (kv * dim, hidden), "v_proj": (kv * dim, hidden)}
        parts["o_proj"] = (hidden, heads * dim)
    return {f"self_attn.{name}": shape for name, shape in parts.items()}


def _feed_forward(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    up, down = (inner, hidden), (hidden, inner)
    if "num_experts" not in config:
        return {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    experts = {"mlp.gate": (config["num_experts"], hidden)}
    for e in range(config["num_experts"]):
        experts |= {f"mlp.experts.{e}.w1": up, f"mlp.experts.{e}.w2": down, f"mlp.experts.{e}.w3": up}
    return experts


def is_tied(config: dict[str, Any]) -> bool:
    default = config["architectures"] != ["LlamaForCausalLM"]
    return bool(config.get("tie_word_embeddings", default))


def state_dict(family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Tensor]:
    """The weights that `write_checkpoint` writes with the same options; a tied head is the embedding's own tensor."""
    if family == "minicpm-llama-format":
        twin = checkpoint_config("minicpm-2b", **options)
        return {n: t.to(dtype) for n, t in fold(_random(twin, seed), twin)[0].items()}
    config = checkpoint_config(family, **options)
    state = {name: tensor.to(dtype) for name, tensor in _random(config, seed).items()}
    if is_tied(config):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _random(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Float32 weights, each drawn by its own name, scaled so that logits have a spread of about 1.5.

    The branches outweigh the embedding, or a tied head would only ever repeat its input.
    """
    state = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))
        state[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * _spread(name, shape, config)
    if is_tied(config):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    spread = float(state["lm_head.weight"].std()) * math.sqrt(config["hidden_size"])
    state["model.norm.weight"] *= 1.5 * _divisor(config) / spread
    return state


def _spread(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> float:
    if name == "model.embed_tokens.weight":
        return 0.02 if _divisor(config) != 1 else 0.2
    gain = 3.0 if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")) else 1.0
    return gain / math.sqrt(shape[-1])


def _divisor(config: dict[str, Any]) -> float:
    llama = config["architectures"] == ["LlamaForCausalLM"]
    return 1.0 if llama else float(config["hidden_size"] / config["dim_model_base"])


def fold(state: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """muP's factors moved into the weights, so that a plain Llama computes the same: weights and config.

    For the dense members without MLA. The result is untied: embedding and head are folded differently.
    """
    branch = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
    folded = dict(state)
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            folded[name] = state[name] * branch
    folded["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] * config["scale_emb"]
    folded["lm_head.weight"] = state["lm_head.weight"] / _divisor(config)
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    return folded, {k: v for k, v in config.items() if k != "auto_map"} | llama


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    fmt: str | None = None,
    quant: str = "F16",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Path:
    """Writes a complete model folder and returns it, or the .gguf file for fmt="gguf".

    `fmt`: "safetensors", "sharded", "bin", "bin-sharded", "gguf" or None for the layout that the family was published
    in. `quant`: the ggml type of a GGUF's matrices. Other options: layers, vocab, tie, exact (the family's true
    widths). "minicpm-sala" gets a config only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = checkpoint_config(family, **options)
    _write_json(folder / "config.json", config | {"torch_dtype": str(dtype).removeprefix("torch.")})
    if family == "minicpm-sala":
        return folder
    tiny = write_tokenizer(folder, family)
    assert config["vocab_size"] >= tiny.size, f"vocab {config['vocab_size']} < the tokenizer's {tiny.size}"
    _write_json(folder / "generation_config.json", generation_of(family, config))
    (folder / "modeling_minicpm.py").write_text(FORBIDDEN_CODE)
    state = state_dict(family, seed=seed, dtype=dtype, **options)
    if fmt == "gguf":
        return write_gguf(folder / f"{family}.{quant}.gguf", config, _own(state, config), tiny, quant)
    write_weights(folder, _stored(state, config, family), fmt or LAYOUT[family])
    return folder


def _own(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Without the head where it is only another name of the embedding."""
    return {n: t for n, t in state.items() if not (n == "lm_head.weight" and is_tied(config))}


def _stored(state: dict[str, Tensor], config: dict[str, Any], family: str) -> dict[str, Tensor]:
    if family != "minicpm-2b":
        return _own(state, config)
    # The oldest uploads keep the rotary tables.
    dim = config["hidden_size"] // config["num_attention_heads"]
    table = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
    layers = range(config["num_hidden_layers"])
    return _own(state, config) | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": table.clone() for i in layers}


def write_weights(folder: Path, state: dict[str, Tensor], fmt: str, shards: int = 3) -> None:
    """Only the weights' files of a checkpoint."""
    from safetensors.torch import save_file

    if fmt == "safetensors":
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    elif fmt == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        stem, suffix = ("pytorch_model", "bin") if fmt == "bin-sharded" else ("model", "safetensors")
        weight_map = {}
        for i, part in enumerate(_split(state, shards), 1):
            file = f"{stem}-{i:05d}-of-{shards:05d}.{suffix}"
            weight_map |= dict.fromkeys(part, file)
            save_file(part, folder / file, metadata={"format": "pt"}) if suffix != "bin" else torch.save(
                part, folder / file
            )
        size = sum(t.nbytes for t in state.values())
        _write_json(
            folder / f"{stem}.{suffix}.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
        )


def _split(state: dict[str, Tensor], shards: int) -> list[dict[str, Tensor]]:
    names = list(state)
    step = -(-len(names) // shards)
    return [{n: state[n] for n in names[i * step : (i + 1) * step]} for i in range(shards)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
