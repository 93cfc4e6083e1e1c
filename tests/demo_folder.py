"""The demo model as a Hugging Face folder of plain weights: what quantizers start from, and what other programs load.

Run as a script: `python tests/demo_folder.py FOLDER [fp32|bf16|fp16]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.hub import demo
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import config_from_gguf, read_header
from minicpm_cli.model.gguf_source import GGUFSource
from minicpm_cli.settings import Settings
from minicpm_cli.text.gguf_vocab import vocabulary_from_gguf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def demo_folder(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the demo (fetched if it is not in the cache) to `path` with weights in `dtype`, and returns `path`."""
    gguf = demo.fetch(Settings.load().cache_dir)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(gguf, dtype)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _write_tokenizer(path, gguf)
    _write_weights(path, gguf, dtype)
    return path


def _config(gguf: Path, dtype: torch.dtype) -> dict[str, Any]:
    found = config_from_gguf(read_header(gguf))
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": found["rope_theta"]}}
    own = {"model_type": "llama", "torch_dtype": str(dtype).removeprefix("torch."), "initializer_range": 0.02}
    plain = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
    return {k: v for k, v in found.items() if k != "rope_scaling"} | rope | own | plain


def _write_tokenizer(path: Path, gguf: Path) -> None:
    """The vocabulary of the file as tokenizer.json, its template where transformers looks for it."""
    vocabulary = vocabulary_from_gguf(gguf)
    metadata = read_header(gguf).metadata
    _write_json(path / "tokenizer.json", vocabulary.tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "pad_token": vocabulary.eos,
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(path / "tokenizer_config.json", config)


def _write_weights(path: Path, gguf: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    source = GGUFSource(gguf, ModelConfig.from_hf(config_from_gguf(read_header(gguf))))
    state: dict[str, Tensor] = {}
    for name in sorted(source.names()):
        stored = source.take(name, source.shape(name))
        plain = stored if isinstance(stored, Tensor) else stored.dequantize()
        state[name] = plain.to(dtype, copy=True).contiguous()
    source.finish()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    print(demo_folder(Path(sys.argv[1]), DTYPES[sys.argv[2] if len(sys.argv) > 2 else "fp32"]))
