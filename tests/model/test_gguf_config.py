"""The config read from a GGUF file against the config.json it was converted from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import FAMILIES, checkpoint_config, write_checkpoint
from minicpm_cli.errors import ConfigError, UnsupportedModel, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import GGUFHeader, GGUFTensor, config_from_gguf, read_header

# What llama.cpp's converter has no key for; test_gguf_lost.py has what is known of it all the same.
LOST = {"minicpm-s-1b": ("activation", "activation_threshold")}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_config_as_before_the_conversion(tmp_path: Path, family: str, exact: bool) -> None:
    want = ModelConfig.from_hf(checkpoint_config(family, exact=exact, layers=1))
    got = ModelConfig.from_hf(config_from_gguf(_header(tmp_path, family, exact)))
    for name in ("embed_scale", "residual_scale", "logit_divisor", "eps"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6), name
    assert got.rope.theta == want.rope.theta
    assert got.rope.long_factor == pytest.approx(want.rope.long_factor)
    assert got.rope.short_factor == pytest.approx(want.rope.short_factor)
    same = ("embed_scale", "residual_scale", "logit_divisor", "eps", "recommended", "notes", "tie_explicit")
    lost = LOST.get(family, ())
    if "rope" not in lost:
        assert got.rope.kind == want.rope.kind
        assert got.rope.attention_factor in (None, 1.0)  # released factors: longest context = original context
    blank: dict[str, Any] = {n: getattr(want, n) for n in (*same, *lost, "rope")}
    assert replace(got, **blank) == want


def _header(folder: Path, family: str, exact: bool) -> GGUFHeader:
    """True widths without the weights: metadata through the writer, and the two shapes that the config needs."""
    small = read_header(write_checkpoint(folder, family, fmt="gguf", layers=1))
    if not exact:
        return small
    from checkpoint_gguf import _add_config, _add_rope, _add_tokens
    from checkpoint_tokenizers import tokenizer_of

    config = checkpoint_config(family, exact=True, layers=1)
    writer = gguf.GGUFWriter(folder / "meta.gguf", small.metadata["general.architecture"])
    _add_config(writer, config, small.metadata["general.architecture"])
    _add_tokens(writer, config, tokenizer_of(family))
    _add_rope(writer, config)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    meta = read_header(folder / "meta.gguf")
    shapes = {"token_embd.weight": (config["vocab_size"], config["hidden_size"])}
    if "kv_lora_rank" in config:
        shapes["blk.0.attn_kv_b.weight"] = (40 * (64 + 64), 256)
    if "output.weight" in small.tensors:
        shapes["output.weight"] = shapes["token_embd.weight"]
    made = {n: GGUFTensor(n, s, "F16", 0, 0) for n, s in shapes.items()}
    return replace(meta, tensors=meta.tensors | made)


def _plain(arch: str = "minicpm", **more: Any) -> GGUFHeader:
    keys = {
        "embedding_length": 2304,
        "block_count": 40,
        "attention.head_count": 36,
        "feed_forward_length": 5760,
        "context_length": 4096,
    }
    metadata = {f"{arch}.{k}": v for k, v in (keys | more).items() if v is not None}
    embed = GGUFTensor("token_embd.weight", (122753, 2304), "F16", 0, 0)
    return GGUFHeader(Path("m.gguf"), 3, {"general.architecture": arch} | metadata, {embed.name: embed})


def test_files_older_than_the_scale_keys() -> None:
    cfg = ModelConfig.from_hf(config_from_gguf(_plain()))
    assert (cfg.embed_scale, cfg.logit_divisor) == (12.0, 9.0)
    assert cfg.residual_scale == pytest.approx(1.4 / math.sqrt(40))
    assert (cfg.kv_heads, cfg.head_dim, cfg.vocab, cfg.tie) == (36, 64, 122753, True)


def test_logit_scale_divides() -> None:
    cfg = ModelConfig.from_hf(config_from_gguf(_plain(logit_scale=6.0, embedding_scale=8.0, residual_scale=0.25)))
    assert (cfg.logit_divisor, cfg.embed_scale) == (pytest.approx(6.0), 8.0)
    assert cfg.residual_scale == pytest.approx(0.25)


def test_llama_has_no_scales_even_with_the_keys() -> None:
    cfg = ModelConfig.from_hf(config_from_gguf(_plain("llama", logit_scale=6.0, embedding_scale=8.0)))
    assert (cfg.logit_divisor, cfg.embed_scale, cfg.residual_scale) == (1.0, 1.0, 1.0)


def test_counts_per_layer() -> None:
    assert config_from_gguf(_plain(**{"attention.head_count_kv": [4] * 40}))["num_key_value_heads"] == 4
    with pytest.raises(ConfigError, match="head_count_kv"):
        config_from_gguf(_plain(**{"attention.head_count_kv": [4] * 39 + [2]}))


@pytest.mark.parametrize("value", [0, -1, "36", 1.5, True, None])
def test_senseless_numbers_name_their_key(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"minicpm\.attention\.head_count "):
        config_from_gguf(_plain(**{"attention.head_count": value}))


def test_head_dim_by_key_then_by_rotary_size_then_by_width() -> None:
    keyed = _plain("llama", **{"attention.key_length": 128, "rope.dimension_count": 32})
    assert config_from_gguf(keyed)["head_dim"] == 128
    assert config_from_gguf(_plain("llama", **{"rope.dimension_count": 32}))["head_dim"] == 32
    assert config_from_gguf(_plain("llama"))["head_dim"] == 64


def test_other_architectures() -> None:
    with pytest.raises(UnsupportedModel, match=r"'qwen2'.*llama, minicpm, minicpm3"):
        config_from_gguf(_plain("qwen2"))
    with pytest.raises(UnsupportedModel, match="None"):
        config_from_gguf(GGUFHeader(Path("m.gguf"), 3, {}, {}))


def test_a_vocabulary_alone_is_no_model() -> None:
    with pytest.raises(WeightsError, match="token_embd"):
        config_from_gguf(replace(_plain(), tensors={}))


def test_yarn_and_linear_scaling() -> None:
    raw = config_from_gguf(_plain("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}))
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    yarn = config_from_gguf(_plain("llama", **{f"rope.scaling.{k}": v for k, v in keys.items()}))["rope_scaling"]
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    with pytest.raises(WeightsError, match="rope_factors"):
        config_from_gguf(_plain(**{"rope.scaling.type": "longrope"}))


def test_one_set_of_frequency_factors(tmp_path: Path) -> None:
    """llama.cpp keeps Llama 3.1's scaling as a tensor of divisors, which holds at every length."""
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    found = read_header(tmp_path / "f.gguf")
    header = replace(
        found, metadata=found.metadata | _plain("llama").metadata, tensors=found.tensors | _plain().tensors
    )
    rope = ModelConfig.from_hf(config_from_gguf(header)).rope
    assert rope.long_factor == rope.short_factor == tuple(factors.tolist())
    assert rope.attention_factor == 1.0


def test_every_end_token_counts() -> None:
    header = _plain()
    header.metadata.update(
        {f"tokenizer.ggml.{n}_token_id": i for n, i in {"bos": 1, "eos": 2, "eot": 9, "eom": 2}.items()}
    )
    cfg = ModelConfig.from_hf(config_from_gguf(header))
    assert (cfg.bos_id, cfg.eos_ids) == (1, (2, 9))
