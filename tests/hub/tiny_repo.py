"""The files of a small sharded model repository, with what must not be fetched beside them."""

from __future__ import annotations

import json

REPO = "someone/tiny"
SHARDS = {f"model-0000{i}-of-00003.safetensors": bytes([i]) * 5000 for i in (1, 2, 3)}


def checkpoint() -> dict[str, bytes]:
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(SHARDS)}}
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "generation_config.json": b"{}",
        "tokenizer.json": b"{}" * 3000,
        "tokenizer_config.json": b'{"add_bos_token": true}',
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **SHARDS,
        "pytorch_model.bin": b"pickle" * 1000,
        "adapter_model.safetensors": b"lora",
        "modeling_tiny.py": b"raise SystemExit",
        "tokenizer_tiny.py": b"raise SystemExit",
        "README.md": b"hello",
        "original/consolidated.safetensors": b"twice",
    }


NEEDED = {
    name for name in checkpoint() if "/" not in name and not name.startswith(("pytorch", "adapter", "README"))
} - {
    "modeling_tiny.py",
    "tokenizer_tiny.py",
}
