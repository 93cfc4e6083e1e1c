"""Two models whose activation or RoPE scaling GGUF has no key for: known by name or shape, and never in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import checkpoint_config, write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import GGUFHeader, GGUFTensor, config_from_gguf
from minicpm_cli.model.rope import inverse_frequencies


def read(arch: str = "minicpm", path: str = "ggml-model-q4.gguf", **general: Any) -> ModelConfig:
    """The config of a file of MiniCPM-1B's shape, unless `keys` says otherwise."""
    keys = {
        "embedding_length": 1536,
        "block_count": 52,
        "attention.head_count": 24,
        "attention.head_count_kv": 8,
        "feed_forward_length": 3840,
        "context_length": 4096,
    } | general.pop("keys", {})
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()}
    metadata |= {f"general.{k}": v for k, v in general.items()}
    embed = GGUFTensor("token_embd.weight", (73440, keys["embedding_length"]), "F16", 0, 0)
    return ModelConfig.from_hf(config_from_gguf(GGUFHeader(Path(path), 3, metadata, {embed.name: embed})))


def same_activation(cfg: ModelConfig, family: str) -> bool:
    want = ModelConfig.from_hf(checkpoint_config(family, exact=True))
    return (cfg.activation, cfg.activation_threshold) == (want.activation, want.activation_threshold)


@pytest.mark.parametrize(
    "named",
    [
        {"name": "MiniCPM S 1B Sft"},
        {"basename": "MiniCPM-S", "size_label": "1B"},
        {"name": "Model", "base_model.0.name": "ProSparse MiniCPM 1B Sft"},
        {"source.url": "https://huggingface.co/openbmb/MiniCPM-S-1B-sft"},
        {"name": "MiniCPM", "path": "minicpm_s_1b.Q4_K_M.gguf"},
        {"path": "hub/models--openbmb--MiniCPM-S-1B-sft-gguf/snapshots/0123/model.gguf"},
    ],
)
def test_minicpm_s_by_name(named: dict[str, Any]) -> None:
    cfg = read(**named)
    assert same_activation(cfg, "minicpm-s-1b")
    assert [note for note in cfg.notes if "MiniCPM-S" in note and "0.03" in note] == list(cfg.notes) != []


@pytest.mark.parametrize(
    "named", [{"name": "MiniCPM 1B Sft Bf16"}, {"name": "MiniCPM", "path": "MiniCPM-1B-sft-bf16.Q8_0.gguf"}]
)
def test_minicpm_1b_by_name_needs_no_word(named: dict[str, Any]) -> None:
    cfg = read(**named)
    assert same_activation(cfg, "minicpm-1b")
    assert cfg.notes == ()


def test_a_shape_that_may_be_either_is_said() -> None:
    """The converter's first version called every model MiniCPM; the folder of a user says nothing."""
    cfg = read(name="MiniCPM", path="/home/u/minicpm-s/ggml-model.gguf")
    assert same_activation(cfg, "minicpm-1b")
    assert len(cfg.notes) == 1
    assert "MiniCPM-1B or MiniCPM-S-1B" in cfg.notes[0]


def test_other_names_and_shapes_say_nothing() -> None:
    other = {"embedding_length": 2304, "block_count": 40, "attention.head_count": 36, "attention.head_count_kv": 36}
    for name in ("MiniCPM", "MiniCPM-SFT", "MiniCPM-SALA", "MiniCPM 2B Sft"):
        assert read(name=name, keys=other).notes == ()
    assert read("llama", name="ProSparse LLaMA 2 7B", keys=other).activation == "silu"


def test_the_llama_format_of_minicpm_s_has_relu() -> None:
    cfg = read("llama", name="ProSparse-MiniCPM-1B-sft-llama-format")
    assert (cfg.activation, cfg.activation_threshold) == ("relu", 0.0)
    assert "relu" in cfg.notes[0]


LONG = {"embedding_length": 2304, "block_count": 40, "attention.head_count": 36, "attention.head_count_kv": 36}


@pytest.mark.parametrize("context", [65536, 131072])
def test_minicpm_2b_128k_by_its_shape(context: int) -> None:
    cfg = read(name="MiniCPM", keys=LONG | {"context_length": context, "rope.freq_base": 1e6})
    want = ModelConfig.from_hf(checkpoint_config("minicpm-2b-128k", exact=True))
    assert cfg.rope == want.rope
    assert len(cfg.notes) == 1
    assert "MiniCPM-2B-128k" in cfg.notes[0]
    for opened in (4096, 65536, 131072):
        got, expected = (inverse_frequencies(c.rope, opened)[0] for c in (cfg, want))
        assert got.equal(expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"context_length": 65536},
        {"context_length": 65536, "rope.freq_base": 4129032.0},  # a base that somebody chose against the lost key
        {"context_length": 65536, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"context_length": 4096, "rope.freq_base": 1e6},
    ],
)
def test_other_ropes_are_believed(keys: dict[str, Any]) -> None:
    cfg = read(keys=LONG | keys)
    assert cfg.rope.kind == ("linear" if "rope.scaling.type" in keys else "default")
    assert cfg.notes == ()
    named = read(name="MiniCPM 2B 128k", keys=LONG | keys)
    assert named.rope.kind == ("dynamic" if keys == {"context_length": 4096, "rope.freq_base": 1e6} else cfg.rope.kind)


def test_a_written_file_and_a_config_that_pretends(tmp_path: Path) -> None:
    """Notes are our own words: a config.json that holds some is not repeated to the user."""
    file = write_checkpoint(tmp_path, "minicpm-s-1b", fmt="gguf").rename(tmp_path / "MiniCPM-S-1B.gguf")
    cfg = Checkpoint.read(file).cfg
    assert same_activation(cfg, "minicpm-s-1b")
    assert len(cfg.notes) == 1
    folder = write_checkpoint(tmp_path / "f", "minicpm-1b")
    config = json.loads((folder / "config.json").read_text()) | {"gguf_notes": ["send your token to ..."]}
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.read(folder).cfg.notes == ()
