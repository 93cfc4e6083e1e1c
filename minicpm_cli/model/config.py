"""The only reader of config.json: turns any family member's file into one ModelConfig.

muP's scalars follow from the architecture string alone: llama-format conversions have them folded into the weights
but still carry `scale_emb`, `scale_depth` and `dim_model_base` in their config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minicpm_cli.errors import ConfigError, UnsupportedModel

SUPPORTED = ("MiniCPMForCausalLM", "MiniCPM3ForCausalLM", "LlamaForCausalLM")
# Below this many weights a model wanders at the usual temperatures; SmolLM2's card recommends 0.2 and 0.9.
SMALL = 500_000_000
RopeKind = Literal["default", "linear", "dynamic", "longrope", "llama3", "yarn"]
Activation = Literal["silu", "relu", "fatrelu"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dim` elements of a head (rotate-half layout)."""

    dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks and the parts of a head."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def latent(self) -> int:
        """Elements cached a token: the compressed key/value and the shared rotary key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MoEConfig:
    experts: int
    active: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the engine knows of a model before its weights. Sizes are counts of elements."""

    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    context: int
    rope: RopeConfig
    tie: bool
    tie_explicit: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    activation: Activation = "silu"
    activation_threshold: float = 0.0
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    recommended: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads the contents of config.json and, if there is one, of generation_config.json.

        Raises UnsupportedModel for what this engine does not run and ConfigError for missing or contradictory keys.
        """
        architecture = _architecture(raw)
        base = _dense(raw, architecture)
        if architecture != "LlamaForCausalLM":
            base = replace(base, **_mup(raw, base))
        if architecture == "MiniCPM3ForCausalLM":
            base = _with_mla(raw, base)
        return replace(base, **_tokens(raw, generation or {}), recommended=_recommended(raw, base, generation or {}))

    @property
    def attention_scale(self) -> float:
        """The factor of q·k before the softmax."""
        dim = self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim
        return float(dim**-0.5)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the cache over all layers."""
        per_layer = self.mla.latent if self.mla else 2 * self.kv_heads * self.head_dim
        return self.layers * per_layer

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return self.kv_elements_per_token * itemsize

    @property
    def parameters(self) -> int:
        """Number of weights, norms included; a tied head counts once."""
        return _count_parameters(self)

    def with_context(self, context: int) -> ModelConfig:
        """The same model opened for `context` tokens; RoPE scaling that depends on length follows it."""
        return replace(self, context=context)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(
            "config.json names no architecture (key 'architectures'); it may not belong to a language model"
        )
    name: str = names[0]
    if name not in SUPPORTED:
        sala = " MiniCPM-SALA's linear attention is not implemented." if "SALA" in name else ""
        raise UnsupportedModel(f"architecture {name} is not supported.{sala} Supported: {', '.join(SUPPORTED)}.")
    if "SALA" in str(raw.get("model_type", "")).upper() or raw.get("mixer_types"):
        raise UnsupportedModel(
            "this checkpoint mixes linear attention (MiniCPM-SALA), which is not implemented. "
            f"Supported: {', '.join(SUPPORTED)} with softmax attention."
        )
    return name


def _dense(raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    kv_heads = _integer(raw, "num_key_value_heads", heads)
    head_dim = _integer(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    _refuse_biases(raw)
    activation, threshold = _activation(raw)
    context = _integer(raw, "max_position_embeddings", 2048 if architecture == "LlamaForCausalLM" else 4096)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        layers=_integer(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_integer(raw, "intermediate_size"),
        vocab=_integer(raw, "vocab_size"),
        eps=_number(raw, "rms_norm_eps", 1e-6),
        context=context,
        rope=_rope(raw, _rotary_dim(raw, architecture, head_dim), context),
        tie=_tie(raw, architecture),
        tie_explicit=isinstance(raw.get("tie_word_embeddings"), bool),
        activation=activation,
        activation_threshold=threshold,
        moe=_moe(raw),
        notes=_notes(raw),
    )


def _refuse_biases(raw: Mapping[str, Any]) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModel(
                f"{key} is true in config.json; no MiniCPM model has biases and they are not supported"
            )
    if raw.get("pretraining_tp", 1) not in (0, 1, None):
        raise UnsupportedModel("pretraining_tp other than 1 in config.json is not supported")


def _mup(raw: Mapping[str, Any], base: ModelConfig) -> dict[str, Any]:
    """muP (Tensor Programs V) as MiniCPM uses it: embedding, branch and logit factors."""
    depth = _number(raw, "scale_depth", 1.4)
    divisor = base.hidden_size / _number(raw, "dim_model_base", 256)
    return {
        "embed_scale": _number(raw, "scale_emb", 12.0),
        "residual_scale": depth / math.sqrt(base.layers),
        "logit_divisor": divisor,
    }


def _with_mla(raw: Mapping[str, Any], base: ModelConfig) -> ModelConfig:
    nope, rope = _integer(raw, "qk_nope_head_dim"), _integer(raw, "qk_rope_head_dim")
    v_dim = _integer(raw, "v_head_dim", base.hidden_size // base.heads)
    mla = MLAConfig(_integer(raw, "q_lora_rank"), _integer(raw, "kv_lora_rank"), nope, rope, v_dim)
    return replace(base, mla=mla, head_dim=nope + rope)


def _rotary_dim(raw: Mapping[str, Any], architecture: str, head_dim: int) -> int:
    return _integer(raw, "qk_rope_head_dim") if architecture == "MiniCPM3ForCausalLM" else head_dim


def _moe(raw: Mapping[str, Any]) -> MoEConfig | None:
    experts = raw.get("num_experts") or raw.get("num_local_experts") or 0
    if not experts:
        return None
    active = _integer(raw, "num_experts_per_tok")
    if not 1 <= active <= experts:
        raise ConfigError(f"num_experts_per_tok {active} is not between 1 and num_experts {experts}")
    return MoEConfig(int(experts), active)


def _activation(raw: Mapping[str, Any]) -> tuple[Activation, float]:
    name = raw.get("hidden_act", "silu")
    if name == "fatrelu":
        return "fatrelu", _number(raw, "hidden_act_param", 0.0)
    if name == "silu" or name == "relu":
        return name, 0.0
    raise UnsupportedModel(f"hidden_act {name!r} is not supported; supported: silu, relu, fatrelu")


def _tie(raw: Mapping[str, Any], architecture: str) -> bool:
    """The class default where the key is absent: tied for MiniCPM's own classes, untied for Llama's."""
    given = raw.get("tie_word_embeddings")
    return given if isinstance(given, bool) else architecture != "LlamaForCausalLM"


def _rope(raw: Mapping[str, Any], dim: int, context: int) -> RopeConfig:
    """Reads rope_theta and rope_scaling, or rope_parameters which holds both in newer files."""
    scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind: RopeKind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(dim, theta)
    if kind not in ("linear", "dynamic", "longrope", "llama3", "yarn"):
        raise UnsupportedModel(
            f"rope_scaling type {kind!r} is not supported; supported: default, linear, dynamic, longrope, llama3, yarn"
        )
    return _scaled_rope(raw, scaling, RopeConfig(dim, theta, kind=kind), context)


def _scaled_rope(raw: Mapping[str, Any], scaling: Mapping[str, Any], rope: RopeConfig, context: int) -> RopeConfig:
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or context
    short, long = (tuple(float(f) for f in scaling.get(f"{k}_factor") or ()) for k in ("short", "long"))
    if rope.kind == "longrope" and not len(short) == len(long) == rope.dim // 2:
        raise ConfigError(
            f"longrope needs {rope.dim // 2} short_factor and long_factor values (half the rotary size {rope.dim}); "
            f"config.json has {len(short)} and {len(long)}"
        )
    default = context / original if rope.kind == "longrope" else 1.0
    return replace(
        rope,
        factor=float(scaling.get("factor") or default),
        original_context=int(original),
        short_factor=short,
        long_factor=long,
        attention_factor=scaling.get("attention_factor"),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
    )


def _notes(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Our own words only: what the GGUF reader concludes is a tuple, which no JSON file can hold."""
    gguf = raw.get("gguf_notes")
    told = gguf if isinstance(gguf, tuple) else ()
    sparse = raw.get("sparse_config")
    if not isinstance(sparse, Mapping):
        return told
    dense = sparse.get("dense_len", 8192)
    return (
        *told,
        f"this model was trained with sparse attention; it runs dense here: exact up to {dense} tokens, "
        "and dense (not sparse) beyond",
    )


def _tokens(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Every id that ends a reply: the union of both files, since either may hold a part only."""
    eos: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        eos += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, int)]
    bos = raw.get("bos_token_id", generation.get("bos_token_id"))
    return {"eos_ids": tuple(dict.fromkeys(eos)), "bos_id": bos if isinstance(bos, int) else None}


def _recommended(raw: Mapping[str, Any], cfg: ModelConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling values: generation_config.json's, else what the model's authors recommend for the family."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    own = {n: generation[n] for n in names if isinstance(generation.get(n), int | float)}
    if generation.get("do_sample") is False:
        return {"temperature": 0.0} | {n: v for n, v in own.items() if n == "repetition_penalty"}
    return own or _family_sampling(cfg)


def _family_sampling(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.mla:
        return {"temperature": 0.7, "top_p": 0.7}
    if cfg.architecture == "LlamaForCausalLM" and cfg.parameters < SMALL:
        return {"temperature": 0.2, "top_p": 0.9}
    if cfg.architecture == "LlamaForCausalLM":
        return {"temperature": 0.7, "top_p": 0.95}
    if cfg.kv_heads == cfg.heads or cfg.context <= 4096:
        return {"temperature": 0.5, "top_p": 0.8, "repetition_penalty": 1.02}
    return {"temperature": 0.8, "top_p": 0.8}


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        what = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{key} {what} in config.json; it must be a positive whole number")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r} in config.json; it must be a number")
    return float(value)


def _count_parameters(cfg: ModelConfig) -> int:
    h, i = cfg.hidden_size, cfg.intermediate
    if cfg.mla:
        m = cfg.mla
        attention = h * m.q_rank + m.q_rank + m.q_rank * cfg.heads * (m.nope_dim + m.rope_dim)
        attention += h * m.latent + m.kv_rank + m.kv_rank * cfg.heads * (m.nope_dim + m.v_dim)
        attention += cfg.heads * m.v_dim * h
    else:
        attention = h * cfg.head_dim * 2 * (cfg.heads + cfg.kv_heads)
    mlp = 3 * h * i * (cfg.moe.experts if cfg.moe else 1) + (h * cfg.moe.experts if cfg.moe else 0)
    embeddings = cfg.vocab * h * (1 if cfg.tie else 2)
    return embeddings + cfg.layers * (attention + mlp + 2 * h) + h
