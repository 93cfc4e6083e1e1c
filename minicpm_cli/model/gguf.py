"""What the metadata of a GGUF file means: the config.json that the model had before llama.cpp converted it.

Key names and defaults follow llama.cpp's converter (conversion/minicpm.py, llama.py) and its model loaders.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from minicpm_cli.errors import ConfigError, UnsupportedModel, WeightsError
from minicpm_cli.model.gguf_header import GGUFHeader, GGUFTensor, Strings, read_header
from minicpm_cli.model.gguf_lost import lost_keys

__all__ = ["ARCHITECTURES", "GGUFHeader", "GGUFTensor", "Strings", "config_from_gguf", "read_header"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
}


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The keys of a Hugging Face config.json, as far as the file tells them.

    Raises UnsupportedModel for other architectures, ConfigError for missing or ill-typed metadata.
    """
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path}: architecture {arch!r} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)}"
        )
    meta = _Metadata(header, arch)
    config = _dense(meta) | _rope(meta) | _tokens(meta)
    if arch != "llama":
        config |= _mup(meta, config)
    if arch == "minicpm3":
        config |= _mla(meta, config)
    config |= _experts(meta)
    return config | lost_keys(header, config)


class _Metadata:
    """Typed look-ups of `<arch>.<key>`; the messages name the full key."""

    def __init__(self, header: GGUFHeader, arch: str) -> None:
        self.header, self.arch = header, arch

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else _uniform(value)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(key, value, "a positive whole number")
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def tensor(self, name: str) -> GGUFTensor:
        found = self.header.tensors.get(name)
        if found is None:
            raise WeightsError(f"{self.header.path} has no tensor {name!r}; it is not a complete model")
        return found

    def floats(self, name: str) -> list[float] | None:
        """The values of a small F32 tensor; None if the file has no such tensor."""
        found = self.header.tensors.get(name)
        if found is None:
            return None
        if found.type != "F32" or len(found.shape) != 1:
            raise WeightsError(f"{self.header.path}: {name} is {found.type} {found.shape}, expected one row of F32")
        with open(self.header.path, "rb") as file:
            file.seek(found.offset)
            return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.nbytes)))

    def _wrong(self, key: str, value: Any, want: str) -> ConfigError:
        what = "is missing" if value is None else f"is {value!r}"
        return ConfigError(f"{self.header.path}: metadata {self.arch}.{key} {what}; it must be {want}")


def _uniform(value: Any) -> Any:
    """llama.cpp writes some counts once a layer; a model of this family has the same in all."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return value[0]
    return value


def _rows(meta: _Metadata, name: str) -> int:
    return meta.tensor(name).shape[0]


def _dense(meta: _Metadata) -> dict[str, Any]:
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    rotary = meta.integer("rope.dimension_count", max(1, hidden // heads))
    return {
        "architectures": [ARCHITECTURES[meta.arch]],
        "model_type": meta.arch,
        "hidden_size": hidden,
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": meta.integer("attention.key_length", rotary),
        "intermediate_size": meta.integer("feed_forward_length"),
        "vocab_size": _rows(meta, "token_embd.weight"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon") or 1e-5,
        "max_position_embeddings": meta.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in meta.header.tensors,
        "hidden_act": "silu",
    }


def _rope(meta: _Metadata) -> dict[str, Any]:
    scaling = _longrope(meta) or _named_scaling(meta)
    return {"rope_theta": meta.number("rope.freq_base") or 10000.0, "rope_scaling": scaling}


def _longrope(meta: _Metadata) -> dict[str, Any] | None:
    """Per-frequency divisors kept as tensors. One set for all lengths (`rope_freqs`) is LongRoPE with equal sets."""
    long, short = meta.floats("rope_factors_long.weight"), meta.floats("rope_factors_short.weight")
    if long is None or short is None:
        long = short = meta.floats("rope_freqs.weight")
    if long is None:
        return None
    context = meta.integer("context_length")
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length", context),
        "attention_factor": meta.number("rope.scaling.attn_factor") or 1.0,
    }


def _named_scaling(meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "longrope":
        raise WeightsError(
            f"{meta.header.path}: metadata asks for longrope but the file has no rope_factors_long/short tensors"
        )
    scaling = {
        "rope_type": kind,
        "factor": meta.number("rope.scaling.factor"),
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length"),
        "attention_factor": meta.number("rope.scaling.attn_factor"),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow"),
    }
    return {k: v for k, v in scaling.items() if v is not None}


def _mup(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp stores the products of muP's constants; files older than these keys mean 12, 1.4 and 256.

    Its converter writes residual_scale = scale_depth / sqrt(layers) and logit_scale = hidden / dim_model_base, and
    its graph divides the logits by logit_scale.
    """
    residual, logit = meta.number("residual_scale"), meta.number("logit_scale")
    return {
        "scale_emb": meta.number("embedding_scale") or 12.0,
        "scale_depth": residual * math.sqrt(config["num_hidden_layers"]) if residual else 1.4,
        "dim_model_base": config["hidden_size"] / logit if logit else 256.0,
    }


def _mla(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rotary, heads = meta.integer("rope.dimension_count"), config["num_attention_heads"]
    nope = meta.integer("attention.key_length") - rotary
    return {
        "q_lora_rank": meta.integer("attention.q_lora_rank"),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": nope,
        "v_head_dim": _rows(meta, "blk.0.attn_kv_b.weight") // heads - nope,
    }


def _experts(meta: _Metadata) -> dict[str, Any]:
    if not meta.get("expert_count"):
        return {}
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
    }


def _tokens(meta: _Metadata) -> dict[str, Any]:
    """llama.cpp ends a reply at any of eos, eot and eom."""
    known = meta.header.metadata
    ends = [known.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": known.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(e for e in ends if isinstance(e, int))),
    }
