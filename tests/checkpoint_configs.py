"""config.json and generation_config.json of every family, as the published ones are, with layers and vocabulary cut."""

from __future__ import annotations

from typing import Any

MUP = {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}
REMOTE_CODE = {
    "AutoConfig": "configuration_minicpm.MiniCPMConfig",
    "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
}


def _dense(hidden: int, heads: int, kv: int, inner: int, context: int, eps: float = 1e-5) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _minicpm(*sizes: Any, **more: Any) -> dict[str, Any]:
    base = {"architectures": ["MiniCPMForCausalLM"], "auto_map": REMOTE_CODE, **_dense(*sizes), **MUP}
    return base | {"bos_token_id": 1, "eos_token_id": 2} | more


def _longrope(count: int, context: int, key: str = "type") -> dict[str, Any]:
    """Released files hold the same factors twice."""
    factors = [round(1 + 30 * (i / (count - 1)) ** 2, 6) for i in range(count)]
    return {
        key: "longrope",
        "long_factor": factors,
        "short_factor": list(factors),
        "original_max_position_embeddings": context,
    }


def _cpm4(context: int, factors: int, *sizes: Any, **more: Any) -> dict[str, Any]:
    rope = _longrope(factors, context, "rope_type")
    return _minicpm(*sizes, context, 1e-6, model_type="minicpm", rope_theta=10000.0, rope_scaling=rope, **more)


def _minicpm3(hidden: int, heads: int, inner: int, ranks: tuple[int, int], parts: tuple[int, int]) -> dict[str, Any]:
    mla = dict(zip(("q_lora_rank", "kv_lora_rank"), ranks, strict=True))
    head = dict(zip(("qk_nope_head_dim", "qk_rope_head_dim"), parts, strict=True))
    base = _minicpm(hidden, heads, heads, inner, 32768, rope_scaling=_longrope(parts[1] // 2, 32768), **mla, **head)
    return base | {"architectures": ["MiniCPM3ForCausalLM"], "tie_word_embeddings": True}


def _minicpm5(hidden: int, head_dim: int, inner: int) -> dict[str, Any]:
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_dense(hidden, 16, 2, inner, 131072, 1e-6)}
    rope = {"rope_theta": 5000000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    return (
        base | rope | {"head_dim": head_dim, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": [1, -1]}
    )


MOE = {"model_type": "minicpm", "num_experts": 8, "num_experts_per_tok": 2}
FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": 0.03}
LONG_2B = {
    "model_type": "minicpm",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "dynamic", "factor": 4.0},
    "max_length": 131072,
    "tie_word_embeddings": False,
}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
SPARSE = {"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64}

# An eos id of -1 stands for <|im_end|>, whose id depends on the vocabulary.
EXACT: dict[str, dict[str, Any]] = {
    "minicpm-2b": _minicpm(2304, 36, 36, 5760, 4096),
    "minicpm-1b": _minicpm(1536, 24, 8, 3840, 4096),
    "minicpm-s-1b": _minicpm(1536, 24, 8, 3840, 4096, **FATRELU),
    "minicpm-2b-128k": _minicpm(2304, 36, 36, 5760, 65536, **LONG_2B),
    "minicpm-moe-8x2b": _minicpm(2304, 36, 36, 5760, 4096, **MOE),
    "minicpm3-4b": _minicpm3(2560, 40, 6400, (768, 256), (64, 32)),
    "minicpm4-0.5b": _cpm4(32768, 32, 1024, 16, 2, 4096, **TIED),
    "minicpm4-8b": _cpm4(32768, 64, 4096, 32, 2, 16384, **UNTIED, sparse_config=SPARSE, pad_token_id=2),
    "minicpm4.1-8b": _cpm4(65536, 64, 4096, 32, 2, 16384, **UNTIED, sparse_config=SPARSE | {"dense_len": 8192}),
    "minicpm5-1b": _minicpm5(1536, 128, 4608),
}
SMALL: dict[str, dict[str, Any]] = {
    "minicpm-2b": _minicpm(64, 4, 4, 160, 4096),
    "minicpm-1b": _minicpm(96, 6, 2, 256, 4096),
    "minicpm-s-1b": _minicpm(96, 6, 2, 256, 4096, **FATRELU),
    "minicpm-2b-128k": _minicpm(64, 4, 4, 160, 65536, **LONG_2B),
    "minicpm-moe-8x2b": _minicpm(64, 4, 4, 160, 4096, **MOE),
    "minicpm3-4b": _minicpm3(128, 4, 320, (64, 32), (32, 16)),
    "minicpm4-0.5b": _cpm4(32768, 8, 256, 16, 2, 1024, **TIED),
    "minicpm4-8b": _cpm4(32768, 8, 256, 16, 2, 1024, **UNTIED, sparse_config=SPARSE, pad_token_id=2),
    "minicpm4.1-8b": _cpm4(65536, 8, 256, 16, 2, 1024, **UNTIED, sparse_config=SPARSE | {"dense_len": 8192}),
    "minicpm5-1b": _minicpm5(192, 16, 576),
}
SALA = _cpm4(524288, 64, 4096, 32, 2, 16384, **UNTIED) | {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "mixer_types": (["minicpm4"] + ["lightning"] * 3) * 8,
    "qk_norm": True,
    "use_output_gate": True,
}
FAMILIES = (*EXACT, "minicpm-llama-format")
SAMPLING = {
    "minicpm-2b": {"temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.02},
    "minicpm3-4b": {"temperature": 0.7, "top_p": 0.7},
    "minicpm4.1-8b": {"temperature": 0.6, "top_p": 0.95},
    "minicpm5-1b": {"temperature": 0.9, "top_p": 0.95},
}
# How OpenBMB published it.
LAYOUT = dict.fromkeys(EXACT, "bin") | {
    "minicpm4-0.5b": "safetensors",
    "minicpm4-8b": "sharded",
    "minicpm4.1-8b": "sharded",
    "minicpm5-1b": "safetensors",
    "minicpm-llama-format": "bin",
}


def chatml(family: str) -> bool:
    return family in ("minicpm-2b-128k", "minicpm3-4b", "minicpm5-1b") or family.startswith("minicpm4")


def config_of(
    family: str,
    *,
    layers: int = 2,
    vocab: int | None = None,
    tie: bool | None = None,
    exact: bool = False,
    im_end: int | None = None,
) -> dict[str, Any]:
    """The config.json. Without `vocab` it is 416, or 417 for the family of the odd 122753."""
    if family == "minicpm-sala":
        return dict(SALA, vocab_size=73448, num_hidden_layers=32)
    source = "minicpm-2b" if family == "minicpm-llama-format" else family
    config = dict((EXACT if exact else SMALL)[source])
    if not exact and "dim_model_base" in config:
        config["dim_model_base"] = config["hidden_size"] // 8
    config |= {"vocab_size": vocab or (417 if source == "minicpm-2b" else 416), "num_hidden_layers": layers}
    if tie is not None:
        config["tie_word_embeddings"] = tie
    if family == "minicpm-llama-format":
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
        del config["auto_map"]
    return _with_ends(config, im_end if chatml(family) else None)


def _with_ends(config: dict[str, Any], im_end: int | None) -> dict[str, Any]:
    eos = config["eos_token_id"]
    listed = [e for e in (eos if isinstance(eos, list) else [eos]) if e >= 0] + ([im_end] if im_end else [])
    return config | {"eos_token_id": listed if len(listed) > 1 else listed[0]}


def generation_of(family: str, config: dict[str, Any]) -> dict[str, Any]:
    own = SAMPLING.get(family, {"temperature": 0.8, "top_p": 0.8})
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    return {"do_sample": True, **own, **ids}
