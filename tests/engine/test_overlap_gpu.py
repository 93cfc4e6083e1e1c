"""Launches that overlap leave the cache, and draw the tokens, that launches one after the other do, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_cases import answers, request, run_checked
from torch import Tensor

from checkpoints import checkpoint_config, tensor_shapes
from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.types import SamplingParams
from steps import decoder_of

PAGE, SEATS, BF16 = 16, 32, torch.bfloat16
KINDS = (SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=1.5, top_p=0.97, max_tokens=28))


def decoder(device: str, heads: int, keys: int) -> Decoder:
    sizes = {"hidden_size": 256, "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 64}
    config = checkpoint_config("minicpm-2b", layers=3) | sizes
    generator, state = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, shape in tensor_shapes(config).items():
        noise, gain = torch.randn(shape, generator=generator), 3.0 if "o_proj" in name or "down_proj" in name else 1.0
        gain = 0.03 if "embed" in name else gain  # or a tied head would repeat its input
        state[name] = (noise * gain / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * noise).to(device, BF16)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return decoder_of(ModelConfig.from_hf(config), state, BF16, device)


def outcome(model: Decoder, cache: str, *, graphs: bool, count: int = 48) -> tuple[dict[str, list[int]], list[Tensor]]:
    """The answers, and what is in the cache in the end. More sequences than seats, and fewer pages than they need."""
    pages, device = SEATS * 6, model.device
    kv = KVCache.allocate(model.cfg, pages, PAGE, device, BF16, KVFormat.of(cache, "bf16"))
    config = EngineConfig(
        pages=pages, max_seqs=SEATS, max_batch_tokens=512, context=512, page_size=PAGE, graphs=graphs, lag=True
    )
    engine, vocab = Engine(model, kv, config), model.cfg.vocab
    asked = []
    for i in range(count):
        tokens = torch.randint(0, vocab, (3 + 37 * i % 120,), generator=torch.Generator().manual_seed(i // 2)).tolist()
        asked.append(request(f"r{i}", tokens, KINDS[i % 3 == 0], seed=i))
    said = answers(run_checked(engine, asked))
    return said, [layer.rows.view(torch.uint8).cpu() for layer in kv.layers]


@pytest.fixture
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes launches wait for each other, until the test ends."""
    from minicpm_cli.kernels import attention_decode_cuda, launch
    from quant.kernels import nvrtc

    attributes, prepared = nvrtc._attributes, attention_decode_cuda._launcher

    def stop() -> None:
        monkeypatch.setattr(launch, "_capability", lambda _: (8, 0))
        monkeypatch.setattr(nvrtc, "_attributes", lambda _, cluster: attributes(False, cluster))
        prepared.cache_clear()

    yield stop
    prepared.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("heads", "keys"), [(36, 36), (16, 2), (9, 9)])
def test_overlapping_launches(heads: int, keys: int, cache: str, graphs: bool, one_after_the_other: Any) -> None:
    model = decoder("cuda", heads, keys)
    overlapping = [outcome(model, cache, graphs=graphs) for _ in range(3)]
    one_after_the_other()
    said, held = outcome(decoder("cuda", heads, keys), cache, graphs=graphs)
    for other, also_held in overlapping:
        assert other == said
        assert all(map(torch.equal, also_held, held))
