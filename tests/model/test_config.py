"""What config.json says of each family member, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from minicpm_cli.errors import ConfigError, UnsupportedModel
from minicpm_cli.model.config import ModelConfig

MUP = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def raw(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["MiniCPMForCausalLM"], "hidden_size": 2304, "intermediate_size": 5760,
        "num_hidden_layers": 40, "num_attention_heads": 36, "vocab_size": 122753, **MUP, **more,
    }  # fmt: skip


def test_mup_follows_the_architecture() -> None:
    cfg = ModelConfig.from_hf(raw())
    assert (cfg.embed_scale, cfg.logit_divisor) == (12.0, 9.0)
    assert cfg.residual_scale == pytest.approx(1.4 / 40**0.5)
    folded = ModelConfig.from_hf(raw(architectures=["LlamaForCausalLM"]))
    assert (folded.embed_scale, folded.residual_scale, folded.logit_divisor) == (1.0, 1.0, 1.0)


def test_mup_defaults_where_keys_are_absent() -> None:
    bare = {k: v for k, v in raw().items() if k not in MUP}
    assert ModelConfig.from_hf(bare).embed_scale == 12.0


@pytest.mark.parametrize(
    ("architecture", "key", "tied"),
    [
        ("MiniCPMForCausalLM", None, True),
        ("MiniCPMForCausalLM", False, False),
        ("LlamaForCausalLM", None, False),
        ("LlamaForCausalLM", True, True),
    ],
)
def test_tie_defaults_of_each_class(architecture: str, key: bool | None, tied: bool) -> None:
    more = {} if key is None else {"tie_word_embeddings": key}
    assert ModelConfig.from_hf(raw(architectures=[architecture], **more)).tie is tied


def test_published_sizes() -> None:
    two = ModelConfig.from_hf(raw())
    assert two.parameters == 2_724_880_896  # 2.725 B
    assert two.kv_bytes_per_token(2) == 368_640
    five = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 1536, "intermediate_size": 4608,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
            "vocab_size": 130560, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert five.parameters == 1_080_632_832  # the model card's figure
    assert five.kv_bytes_per_token(2) == 24_576
    three = ModelConfig.from_hf(
        raw(
            architectures=["MiniCPM3ForCausalLM"], hidden_size=2560, intermediate_size=6400, num_hidden_layers=62,
            num_attention_heads=40, vocab_size=73448, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64,
            qk_rope_head_dim=32,
        )
    )  # fmt: skip
    assert three.kv_bytes_per_token(2) == 35_712
    assert three.attention_scale == pytest.approx(96**-0.5)


def test_every_eos_id_of_both_files() -> None:
    cfg = ModelConfig.from_hf(raw(eos_token_id=2, bos_token_id=1), {"eos_token_id": [2, 73440]})
    assert cfg.eos_ids == (2, 73440)
    assert cfg.bos_id == 1
    assert ModelConfig.from_hf(raw(eos_token_id=[1, 130073])).eos_ids == (1, 130073)


def test_generation_config_before_the_family() -> None:
    cfg = ModelConfig.from_hf(raw(), {"temperature": 0.8, "top_p": 0.8})
    assert cfg.recommended == {"temperature": 0.8, "top_p": 0.8}
    assert ModelConfig.from_hf(raw()).recommended["repetition_penalty"] == 1.02
    assert ModelConfig.from_hf(raw(), {"do_sample": False, "top_p": 0.8}).recommended == {"temperature": 0.0}


def test_sparse_attention_is_said() -> None:
    (note,) = ModelConfig.from_hf(raw(sparse_config={"dense_len": 8192})).notes
    assert "8192" in note


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architectures": ["MiniCPMSALAForCausalLM"]}, UnsupportedModel, "SALA"),
        ({"architectures": ["Qwen2ForCausalLM"]}, UnsupportedModel, "LlamaForCausalLM"),
        ({"architectures": None}, ConfigError, "architectures"),
        ({"mixer_types": ["minicpm4", "lightning"]}, UnsupportedModel, "linear attention"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ({"hidden_size": None}, ConfigError, "hidden_size is missing"),
        ({"hidden_size": "2304"}, ConfigError, "'2304'"),
        ({"num_key_value_heads": 5}, ConfigError, "multiple"),
        ({"rope_scaling": {"type": "fancy"}}, UnsupportedModel, "fancy"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, ConfigError, "32"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, ConfigError, "num_experts_per_tok"),
        ({"scale_depth": "1.4"}, ConfigError, "scale_depth"),
    ],
)
def test_refusals_say_what(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ModelConfig.from_hf(raw(**change))


def test_unknown_keys_are_ignored() -> None:
    """Keys that made other loaders run code mean nothing here."""
    harmless = raw(auto_map={"AutoModelForCausalLM": "modeling.X"}, _attn_implementation_internal="os.system('x')")
    assert ModelConfig.from_hf(harmless) == ModelConfig.from_hf(raw())
