"""What a checkpoint holds, from its config alone: every tensor by name, and which of them are linear weights."""

from __future__ import annotations

from collections.abc import Iterator

from minicpm_cli.model.config import ModelConfig

Shape = tuple[int, ...]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def is_linear(name: str) -> bool:
    """Whether `name` is a matrix of a block that a quantizer packs; norms, the router, embedding and head are none."""
    return name.startswith("model.layers.") and name.endswith(
        ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    )


def is_absorbed(name: str) -> bool:
    """Whether the decoder multiplies `name` out when it is loaded (MLA's kv_b), so that it is plain in memory."""
    return name.endswith(".kv_b_proj.weight")


def tensor_shapes(cfg: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint of `cfg`, by its Hugging Face name."""
    h = cfg.hidden_size
    shapes: dict[str, Shape] = {EMBED: (cfg.vocab, h), "model.norm.weight": (h,)}
    if not cfg.tie:
        shapes[HEAD] = (cfg.vocab, h)
    for layer in range(cfg.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer(cfg)}
    return shapes


def _layer(cfg: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "input_layernorm", (cfg.hidden_size,)
    yield "post_attention_layernorm", (cfg.hidden_size,)
    yield from _latent_attention(cfg) if cfg.mla else _attention(cfg)
    yield from _experts(cfg) if cfg.moe else _mlp(cfg, "mlp", ("gate_proj", "up_proj", "down_proj"))


def _attention(cfg: ModelConfig) -> Iterator[tuple[str, Shape]]:
    h, q, kv = cfg.hidden_size, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    yield "self_attn.q_proj", (q, h)
    yield "self_attn.k_proj", (kv, h)
    yield "self_attn.v_proj", (kv, h)
    yield "self_attn.o_proj", (h, q)


def _latent_attention(cfg: ModelConfig) -> Iterator[tuple[str, Shape]]:
    m, h = cfg.mla, cfg.hidden_size
    assert m is not None
    yield "self_attn.q_a_proj", (m.q_rank, h)
    yield "self_attn.q_a_layernorm", (m.q_rank,)
    yield "self_attn.q_b_proj", (cfg.heads * (m.nope_dim + m.rope_dim), m.q_rank)
    yield "self_attn.kv_a_proj_with_mqa", (m.kv_rank + m.rope_dim, h)
    yield "self_attn.kv_a_layernorm", (m.kv_rank,)
    yield "self_attn.kv_b_proj", (cfg.heads * (m.nope_dim + m.v_dim), m.kv_rank)
    yield "self_attn.o_proj", (h, cfg.heads * m.v_dim)


def _mlp(cfg: ModelConfig, prefix: str, names: tuple[str, str, str]) -> Iterator[tuple[str, Shape]]:
    gate, up, down = names
    yield f"{prefix}.{gate}", (cfg.intermediate, cfg.hidden_size)
    yield f"{prefix}.{up}", (cfg.intermediate, cfg.hidden_size)
    yield f"{prefix}.{down}", (cfg.hidden_size, cfg.intermediate)


def _experts(cfg: ModelConfig) -> Iterator[tuple[str, Shape]]:
    assert cfg.moe is not None
    yield "mlp.gate", (cfg.moe.experts, cfg.hidden_size)
    for expert in range(cfg.moe.experts):
        yield from _mlp(cfg, f"mlp.experts.{expert}", ("w1", "w3", "w2"))
