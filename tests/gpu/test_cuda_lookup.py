"""Prompt lookup on a GPU: tokens verified several in a step are, one by one, those that steps of one row draw."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest
from minicpm_cli.engine.speculation import Price
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.model.shapes import EMBED, HEAD, Shape
from minicpm_cli.types import SamplingParams
from steps import KERNELS

pytestmark = pytest.mark.gpu
GPU, PAGES = torch.device("cuda"), 200
WORDS = 40
KINDS = (SamplingParams(temperature=0, max_tokens=120), SamplingParams(temperature=0.1, top_k=3, max_tokens=120))


class FewWords(RandomSource):
    """Only the first words of the vocabulary have scores: what is said runs in circles, or nearly."""

    def _draw(self, name: str, shape: Shape) -> Tensor:
        drawn = super()._draw(name, shape)
        if name in (EMBED, HEAD):
            drawn[WORDS:] = 0
        return drawn


def decoder_of(shape: str, quantize: str | None) -> Decoder:
    """Few layers and words of a real shape."""
    cfg = replace(ModelConfig.from_hf(raw_config(shape)), layers=3, vocab=1500, tie=False).with_context(1024)
    source = FewWords(cfg, device=GPU, dtype=torch.bfloat16)
    scheme = LoadScheme.of(quantize, None)
    return build_decoder(source, cfg, GPU, torch.bfloat16, scheme=scheme, kernels=Path(KERNELS))


def said(decoder: Decoder, lookup: int, seats: int, kv_dtype: str, graphs: bool) -> tuple[dict[str, list[int]], Engine]:
    kv = KVCache.allocate(decoder.cfg, PAGES, 16, GPU, torch.bfloat16, KVFormat.of(kv_dtype, "bf16"))
    sizes = {"max_seqs": seats, "max_batch_tokens": 1024, "context": 1024, "graphs": graphs, "lookup": lookup}
    engine = Engine(decoder, kv, EngineConfig(pages=PAGES, **sizes))
    if engine.scheduler.speculation:
        engine.scheduler.speculation.price = Price(0.0, 0.0)  # whatever it costs
    engine._clock = lambda: 0.0
    draw, answers = random.Random(1), dict[str, list[int]]()
    prompts = [tuple(draw.choices(range(WORDS), k=40 + 11 * i)) * 3 for i in range(seats)]
    for event in engine.generate(
        [EngineRequest(str(i), p, KINDS[i % 2], seed=i) for i, p in enumerate(prompts)],
    ):
        assert event.error is None, event.error
        engine.scheduler.pool.check()
        if event.token is not None:
            answers.setdefault(event.id, []).append(event.token)
    return answers, engine


@pytest.mark.parametrize(
    ("shape", "quantize", "kv_dtype"),
    [
        ("minicpm-2b", None, "auto"),
        ("minicpm-2b", "w4", "fp8"),
        ("minicpm4-8b", None, "int8"),
        ("minicpm4-8b", "w4", "auto"),
    ],
)
def test_the_same_tokens_in_fewer_steps(shape: str, quantize: str | None, kv_dtype: str) -> None:
    decoder, rejected = decoder_of(shape, quantize), 0
    assert decoder.alike_rows == 8
    for seats, graphs in ((1, True), (2, True), (4, True), (2, False)):
        plain, one_by_one = said(decoder, 0, seats, kv_dtype, graphs)
        found, engine = said(decoder, 7, seats, kv_dtype, graphs)
        assert found == plain, (seats, graphs)
        assert engine.stats.accepted_tokens > 0
        assert engine.stats.steps < one_by_one.stats.steps
        rejected += engine.stats.proposed_tokens - engine.stats.accepted_tokens
    assert rejected > 0


@pytest.mark.parametrize("shape", ["minicpm3-4b", "minicpm-moe-8x2b"])
def test_not_where_rows_depend_on_their_number(shape: str) -> None:
    decoder = decoder_of(shape, None)
    assert decoder.alike_rows == 1
    assert said(decoder, 7, 1, "auto", True)[1].stats.drafts == 0
