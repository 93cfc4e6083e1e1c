"""Logits against transformers' independent implementations, at the exact widths of each family: float32 on the CPU,
bfloat16 through the kernels on a GPU.

transformers has no MiniCPM 1/2/4; Granite with its four multipliers computes exactly muP.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from minicpm_cli.model.config import ModelConfig
from steps import all_logits, decoder_of, relative_error

VOCAB, LAYERS = 257, 2
MUP = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32768,
    "short_factor": [1.0 + 0.07 * i for i in range(32)],
    "long_factor": [1.0 + 0.11 * i for i in range(32)],
}


def config(architecture: str, hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


GRANITE = {
    "minicpm-2b": config("MiniCPMForCausalLM", 2304, 5760, 36, 36, **MUP),
    "minicpm-1b": config("MiniCPMForCausalLM", 1536, 3840, 24, 8, **MUP),
    "minicpm-2b-128k": config(
        "MiniCPMForCausalLM", 2304, 5760, 36, 36, rope_theta=1e6, tie_word_embeddings=False,
        max_position_embeddings=65536, rope_scaling={"type": "dynamic", "factor": 4.0}, **MUP,
    ),
    "minicpm4-0.5b": config(
        "MiniCPMForCausalLM", 1024, 4096, 16, 2, max_position_embeddings=32768, rope_scaling=LONGROPE, **MUP
    ),
    "minicpm4-8b-narrow": config(
        "MiniCPMForCausalLM", 1024, 4096, 8, 2, head_dim=128, tie_word_embeddings=False, **MUP,
    ),
}  # fmt: skip
LLAMA = {
    "minicpm5-1b": config(
        "LlamaForCausalLM", 1536, 4608, 16, 2, head_dim=128, rope_theta=5e6, tie_word_embeddings=False
    ),
    "llama-format with left-over muP keys": config("LlamaForCausalLM", 1024, 2816, 16, 16, **MUP),
    "smollm2": config("LlamaForCausalLM", 576, 1536, 9, 3, rope_theta=1e5, tie_word_embeddings=True),
    "linear rope": config(
        "LlamaForCausalLM", 256, 512, 4, 2, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "relu (S-1B llama-format)": config("LlamaForCausalLM", 256, 512, 4, 2, hidden_act="relu"),
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weights_of(model: torch.nn.Module, tie: bool, place: str = "cpu") -> dict[str, Tensor]:
    """Random weights of a size that keeps every layer's signal: transformers' own start would hide mistakes.

    For a GPU they are rounded to what bfloat16 holds, so that only the arithmetic differs.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            p.copy_(mean + torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 1 else p.shape[-1] ** -0.5))
            if place == "cuda":
                p.copy_(p.bfloat16())
    state = {k: v.detach() for k, v in model.state_dict().items()}
    return {k: v for k, v in state.items() if not (tie and k == "lm_head.weight")}


def ids(count: int = 21) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def check(raw: dict[str, Any], model: torch.nn.Module, place: str) -> None:
    cfg = ModelConfig.from_hf(raw)
    compare(cfg, weights_of(model, cfg.tie, place), reference_logits(model, ids()), place)
    assert cfg.parameters == sum(p.numel() for p in model.parameters())


def compare(cfg: ModelConfig, tensors: dict[str, Tensor], expected: Tensor, place: str) -> None:
    """A whole prompt, then chunks and single tokens; on a GPU also that the likeliest token is the same one."""
    dtype, bound = (torch.float32, 1e-5) if place == "cpu" else (torch.bfloat16, 2e-2)
    decoder = decoder_of(cfg, tensors, dtype, place)
    for chunks in (None, [9, 1, 1, 7, 3]):
        logits = all_logits(decoder, ids(), *([chunks] if chunks else [])).cpu()
        assert relative_error(logits, expected) <= bound
        top = expected.topk(2, -1).values
        sure = top[:, 0] - top[:, 1] > 2 * bound * expected.abs().amax(-1)
        assert torch.equal(logits.argmax(-1)[sure], expected.argmax(-1)[sure])


def llama_like(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys that transformers' own classes read; ours reads the whole file."""
    drop = {"architectures", "scale_emb", "scale_depth", "dim_model_base"}
    return {"attn_implementation": "eager", **{k: v for k, v in raw.items() if k not in drop}}


@pytest.mark.parametrize("name", GRANITE)
def test_mup_equals_granite(name: str, place: str) -> None:
    raw = GRANITE[name]
    keys = llama_like(raw) | {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    granite = transformers.GraniteConfig(
        **keys,
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / math.sqrt(LAYERS),
        logits_scaling=raw["hidden_size"] / 256,
        attention_multiplier=head_dim**-0.5,
    )
    check(raw, transformers.GraniteForCausalLM(granite).eval(), place)


@pytest.mark.parametrize("name", LLAMA)
def test_llama_format_equals_llama(name: str, place: str) -> None:
    raw = LLAMA[name]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like(raw))).eval()
    check(raw, model, place)


def test_mla_equals_minicpm3(place: str) -> None:
    raw = config(
        "MiniCPM3ForCausalLM", 2560, 6400, 40, 40, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64,
        qk_rope_head_dim=32, max_position_embeddings=32768, tie_word_embeddings=True, **MUP,
        rope_scaling=LONGROPE | {k: LONGROPE[k][:16] for k in ("short_factor", "long_factor")},
    )  # fmt: skip
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    keys = {k: v for k, v in raw.items() if k != "architectures"}
    keys["rope_scaling"] = raw["rope_scaling"] | {"factor": 1.0}  # transformers 5.17 reads it, whatever the kind
    model = transformers.MiniCPM3ForCausalLM(
        transformers.MiniCPM3Config(**keys, attn_implementation="eager", v_head_dim=64)
    )
    check(raw, model.eval(), place)


def test_moe_equals_mixtral(place: str) -> None:
    raw = config(
        "MiniCPMForCausalLM", 576, 1440, 9, 9, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=True,
        scale_emb=1, scale_depth=math.sqrt(LAYERS), dim_model_base=576,
    )  # fmt: skip
    keys = llama_like(raw) | {"num_local_experts": 8, "rope_theta": 10000.0}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**keys, sliding_window=None)).eval()
    cfg = ModelConfig.from_hf(raw)
    tensors = as_minicpm_moe(weights_of(model, tie=True, place=place))
    compare(cfg, tensors, reference_logits(model, ids()), place)
    assert cfg.parameters == sum(p.numel() for p in model.parameters())


def as_minicpm_moe(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mixtral's stacked experts under the checkpoint's names: w1 gate, w3 up, w2 down, one tensor an expert."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(e)
                out |= {f"{stem}.w1.weight": gate, f"{stem}.w3.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{e}.w2.weight": down for e, down in enumerate(value)}
        else:
            out[name] = value
    return out


def test_fatrelu_keeps_what_reaches_the_threshold() -> None:
    raw = config(
        "MiniCPMForCausalLM", 64, 128, 4, 4, hidden_act="fatrelu", hidden_act_param=0.03, num_hidden_layers=1,
        scale_emb=1, scale_depth=1, dim_model_base=64,
    )  # fmt: skip
    cfg = ModelConfig.from_hf(raw)
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(5, 256, generator=generator) * 0.05
    gate_up[0, 0] = 0.03
    from minicpm_cli.kernels.reference import relu_mul

    gate, up = gate_up.double()[:, :128], gate_up.double()[:, 128:]
    expected = gate * (gate_up[:, :128] >= 0.03).double() * up
    assert cfg.activation_threshold == 0.03
    assert relative_error(relu_mul(gate_up, cfg.activation_threshold), expected) < 1e-6
    assert relu_mul(gate_up, 0.03)[0, 0] == gate_up[0, 0] * gate_up[0, 128]
