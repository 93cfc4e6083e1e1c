"""The same work done by transformers, in the same process: the number to compare ours with."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.bench.speed import Clock, Run
from minicpm_cli.errors import UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.gguf import config_from_gguf, read_header
from minicpm_cli.model.source import open_source
from minicpm_cli.types import SamplingParams

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


AT_ONCE = 64  # sequences; more are done one such batch after the other
Choose = Callable[[Tensor], Tensor]  # [B, V] -> [B, 1]


class TransformersRunner:
    """A plain loop over the model's own cache: less overhead than its `generate`."""

    def __init__(self, model: Any, clock: Clock = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed within transformers 5

    @torch.inference_mode()
    def run(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> Run:
        """All prompts have the same length, so nothing is padded."""
        new, choose = params.max_tokens or 0, _chooser(params)
        start, first = self._clock(), 0.0
        for begin in range(0, len(prompts), AT_ONCE):
            reached = self._run_batch(prompts[begin : begin + AT_ONCE], new, choose)
            first = first or reached - start
        return Run(sum(map(len, prompts)), len(prompts) * new, first, self._clock() - start)

    def _run_batch(self, prompts: list[tuple[int, ...]], new: int, choose: Choose) -> float:
        """When the first token was there."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        token = self._step(torch.tensor(prompts, device=self._model.device), cache, choose)
        first = self._clock()
        for _ in range(new - 1):
            token = self._step(token, cache, choose)
        return first

    def _step(
        self,
        ids: Tensor,  # [B, T]
        cache: Any,
        choose: Choose,
    ) -> Tensor:  # [B, 1]
        logits = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits
        token = choose(logits[:, -1])
        token.tolist()  # the host needs each token, as it does in any engine that streams
        return token


def _chooser(params: SamplingParams) -> Choose:
    """The likeliest token, or one drawn as transformers' own `generate` draws it."""
    if params.temperature == 0:
        return lambda logits: logits.argmax(-1, keepdim=True)
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    warm, cut = TemperatureLogitsWarper(params.temperature), TopPLogitsWarper(params.top_p)
    nothing = torch.empty(0, dtype=torch.int64)  # in the place of the ids, which they do not look at

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial(cut(nothing, warm(nothing, logits.float())).softmax(-1), 1)

    return choose


def load_peer(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model of a folder, or its Llama with the dequantized weights of a .gguf file."""
    if path.suffix == ".gguf":
        return _llama_of_gguf(path, device, dtype)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval()


def random_peer(raw: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' Llama of the same sizes: muP's factors cost no time. Not for latent attention or experts."""
    if raw.get("kv_lora_rank") or raw.get("num_experts"):
        raise UsageError(
            "--against transformers has no counterpart for latent attention or experts with random weights; "
            "choose a dense shape, or -m MODEL"
        )
    return _llama(raw, device, dtype)


def _llama(raw: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    tie = raw.get("tie_word_embeddings", raw["architectures"] != ["LlamaForCausalLM"])
    rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)}
    sizes = {key: raw[key] for key in LLAMA_KEYS if key in raw}
    build: Any = LlamaForCausalLM._from_config
    with torch.device(device):
        return build(LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=tie), dtype=dtype).eval()


def _llama_of_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers reads GGUF only with accelerate at hand, so the weights come through our own reader."""
    raw = config_from_gguf(read_header(path))
    if raw["architectures"] != ["LlamaForCausalLM"]:
        raise UsageError(f"--against transformers reads GGUF files of Llama models only, not {raw['architectures'][0]}")
    cfg = ModelConfig.from_hf(raw)
    source = open_source(path, cfg)
    model = _llama({**raw, "tie_word_embeddings": "lm_head.weight" not in source}, device, dtype)
    places = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted(source.names() & set(places)):
            stored = source.take(name, tuple(places[name].shape))
            places[name].copy_(stored if isinstance(stored, Tensor) else stored.dequantize())
    source.finish()
    return model
