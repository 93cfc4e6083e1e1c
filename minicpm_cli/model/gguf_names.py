"""llama.cpp's tensor names and the Hugging Face names of the same tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
# Rotary tables: read with the config, or derived from it.
DERIVED = ("rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight")
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.weight$")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, or expert number `expert` out of a stack of them."""

    tensor: str
    expert: int | None = None


def huggingface_names(name: str, experts: int) -> Iterator[tuple[str, Part]]:
    """The name or, for `experts` stacked experts, the names of GGUF tensor `name`; an unknown one keeps its own."""
    match = _LAYER_NAME.match(name)
    if name in WHOLE:
        yield WHOLE[name], Part(name)
    elif match and match[2].removesuffix("_exps") in EXPERT and match[2].endswith("_exps") and not match[3]:
        part = EXPERT[match[2].removesuffix("_exps")]
        for e in range(experts):
            yield f"model.layers.{match[1]}.mlp.experts.{e}.{part}.weight", Part(name, e)
    elif match and match[3] and match[2] in EXPERT:  # files of early 2024: one tensor an expert
        yield f"model.layers.{match[1]}.mlp.experts.{match[3]}.{EXPERT[match[2]]}.weight", Part(name)
    elif match and not match[3] and match[2] in LAYER:
        yield f"model.layers.{match[1]}.{LAYER[match[2]]}.weight", Part(name)
    else:
        yield name, Part(name)
