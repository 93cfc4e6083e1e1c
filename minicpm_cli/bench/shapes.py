"""The family's configurations, for measuring speed with random weights where the real ones are not at hand.

Only what decides sizes and work is here; longrope's factors are ones, since their values cost no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minicpm_cli.errors import UsageError


def _mup(**keys: Any) -> dict[str, Any]:
    common = {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "hidden_act": "silu",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return common | keys


def _size(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


def _longrope(pairs: int, original: int = 32768) -> dict[str, Any]:
    ones = [1.0] * pairs
    scaling = {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
    return {
        "rope_scaling": scaling | {"original_max_position_embeddings": original},
        "max_position_embeddings": original,
    }


def _v4(**keys: Any) -> dict[str, Any]:
    return _mup(rms_norm_eps=1e-6, eos_token_id=[2, 73440], **keys)


def _v5(**keys: Any) -> dict[str, Any]:
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": [1, 130073],
    }
    return common | keys


_MLA = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "eos_token_id": [2, 73440],
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "minicpm-2b": _mup(**_size(2304, 40, 36, 36, 5760, 122753)),
    "minicpm-1b": _mup(**_size(1536, 52, 24, 8, 3840, 73440)),
    "minicpm-moe-8x2b": _mup(**_size(2304, 40, 36, 36, 5760, 122753), num_experts=8, num_experts_per_tok=2),
    "minicpm3-4b": _mup(**_size(2560, 62, 40, 40, 6400, 73448), **_MLA, **_longrope(16)),
    "minicpm4-0.5b": _v4(**_size(1024, 24, 16, 2, 4096, 73448), **_longrope(32)),
    "minicpm4-8b": _v4(**_size(4096, 32, 32, 2, 16384, 73448), **_longrope(64), tie_word_embeddings=False),
    "minicpm5-1b": _v5(**_size(1536, 24, 16, 2, 4608, 130560)),
    "minicpm5-2b": _v5(**_size(2048, 42, 16, 2, 6144, 130560)),
}


def raw_config(shape: str) -> Mapping[str, Any]:
    """What config.json of that model holds. Raises UsageError that lists the known shapes."""
    if shape not in SHAPES:
        raise UsageError(f"no shape is called {shape!r}; choose one of: {', '.join(SHAPES)}")
    return SHAPES[shape]
