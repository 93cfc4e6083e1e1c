"""The same work done by transformers, in the same process: the number to compare ours with."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.bench.speed import Clock, Run
from minicpm_cli.errors import UsageError

LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


class TransformersRunner:
    """Greedy decoding by a plain loop over the model's own cache: less overhead than its `generate`."""

    def __init__(self, model: Any, clock: Clock = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed within transformers 5

    @torch.inference_mode()
    def run(self, prompts: list[tuple[int, ...]], new: int) -> Run:
        """All prompts have the same length, so nothing is padded."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor(prompts, device=self._model.device)
        start = self._clock()
        token = self._step(ids, cache)
        first = self._clock() - start
        for _ in range(new - 1):
            token = self._step(token, cache)
        return Run(ids.numel(), len(prompts) * new, first, self._clock() - start)

    def _step(
        self,
        ids: Tensor,  # [B, T]
        cache: Any,
    ) -> Tensor:  # [B, 1]
        logits = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits
        token: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        token.tolist()  # the host needs each token, as it does in any engine that streams
        return token


def load_peer(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model of a folder or a .gguf file, whose weights it dequantizes."""
    from transformers import AutoModelForCausalLM

    where, which = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **which)
    return model.to(device).eval()


def random_peer(raw: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' Llama of the same sizes: muP's factors cost no time. Not for latent attention or experts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if raw.get("kv_lora_rank") or raw.get("num_experts"):
        raise UsageError(
            "--against transformers has no counterpart for latent attention or experts with random weights; "
            "choose a dense shape, or -m MODEL"
        )
    tie = raw.get("tie_word_embeddings", raw["architectures"] != ["LlamaForCausalLM"])
    config = LlamaConfig(**{key: raw[key] for key in LLAMA_KEYS if key in raw}, tie_word_embeddings=tie)
    build: Any = LlamaForCausalLM._from_config
    with torch.device(device):
        return build(config, dtype=dtype).eval()
