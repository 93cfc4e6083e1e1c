"""A model folder of a member's true sizes with random weights, for timing what a user waits for at the start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import Shape, tensor_shapes

SHARD_WEIGHTS = 2_000_000_000  # of a file, as published ones have it
CONTROL = ("<unk>", "<s>", "</s>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_folder(folder: Path, shape: str, device: torch.device, **changes: Any) -> None:
    """bf16 safetensors drawn on `device`, config.json (with `changes`) and a tokenizer as large as the vocabulary."""
    raw = dict(raw_config(shape)) | {"torch_dtype": "bfloat16"} | changes
    cfg = ModelConfig.from_hf(raw)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    _write_weights(folder, cfg, device)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(cfg.vocab)), encoding="utf-8")
    spoken = {"bos_token": CONTROL[1], "eos_token": CONTROL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(spoken), encoding="utf-8")


def _write_weights(folder: Path, cfg: ModelConfig, device: torch.device) -> None:
    from safetensors.torch import save_file

    source = RandomSource(cfg, device=device, dtype=torch.bfloat16)
    shards = list(_shards(tensor_shapes(cfg)))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: source.take(name, source.shape(name)).cpu() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _shards(shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    """The names in order, in runs that fill a file."""
    names, weights = list[str](), 0
    for name, shape in shapes.items():
        names.append(name)
        weights += torch.Size(shape).numel()
        if weights >= SHARD_WEIGHTS:
            yield names
            names, weights = [], 0
    if names:
        yield names


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Bytes one by one; every other id decodes to a word, so that whatever is drawn can be seen."""
    from tokenizers import pre_tokenizers

    texts = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += [f"w{number}" for number in range(len(texts), vocab)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number, text in enumerate(CONTROL)
        ],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(texts[:vocab])}, "merges": []},
    }
