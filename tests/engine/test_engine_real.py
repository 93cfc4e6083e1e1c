"""The engine over real decoders: tiny checkpoints of each kind of attention and feed-forward, float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_cases import answers, prompt, request, run_checked

from checkpoints import write_checkpoint
from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.loader import load_model
from minicpm_cli.types import SamplingParams
from steps import all_logits

FAMILIES = ("minicpm4-0.5b", "minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b")
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, max_tokens=9)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return load_model(folder, cfg, CPU, torch.float32)


def engine_over(decoder: Decoder, pages: int = 100, **options: int) -> Engine:
    kv = KVCache.allocate(decoder.cfg, pages, 4, CPU, torch.float32)
    sizes = {"max_seqs": 8, "max_batch_tokens": 64, "context": 120} | options
    return Engine(decoder, kv, EngineConfig(pages=pages, page_size=4, **sizes))


def argmaxes(decoder: Decoder, start: tuple[int, ...]) -> list[int]:
    """Every token from a forward pass over the whole history."""
    history = list(start)
    for _ in range(9):
        history.append(int(all_logits(decoder, history)[-1].argmax()))
    return history[len(start) :]


def test_greedy_is_what_whole_forward_passes_say(decoder: Decoder) -> None:
    requests = [request(f"r{i}", prompt(5 + 4 * i, i), GREEDY) for i in range(4)]
    want = {r.id: argmaxes(decoder, r.prompt) for r in requests}
    for options in ({}, {"max_batch_tokens": 5}, {"pages": 12}, {"max_seqs": 1}):
        engine = engine_over(decoder, **options)
        for _ in range(2):  # the second time on cached pages
            assert answers(run_checked(engine, requests)) == want, options
        assert engine.stats.cached_tokens or engine.stats.preemptions, options


LONGEST = -(-(17 + 9) // 4)  # pages of the longest of the requests below; one more is the dummy
WAYS = {
    "alone": {"max_seqs": 1},
    "batched": {},
    "chunked": {"max_batch_tokens": 5},
    "preempted": {"pages": LONGEST + 1 + 5},
    "prefix-hit": {},
    "no page to spare": {"pages": LONGEST + 1},
    "one page to spare": {"pages": LONGEST + 1 + 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_greedy_tokens_whichever_way(decoder: Decoder, way: str) -> None:
    requests = [request(f"r{i}", prompt(5 + 4 * i, i), GREEDY) for i in range(4)]
    want = {r.id: argmaxes(decoder, r.prompt) for r in requests}
    engine = engine_over(decoder, **WAYS[way])
    forward, sizes = engine.runner.forward.step, list[tuple[int, ...]]()

    def watched(batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        sizes.append(batch.q_lens)
        return forward(batch, kv)

    engine.runner.forward.step = watched
    for _ in range(2 if way == "prefix-hit" else 1):
        assert answers(run_checked(engine, requests)) == want
    happened = {
        "alone": max(map(len, sizes)) == 1,
        "batched": max(map(len, sizes)) == 4,
        "chunked": max(map(sum, sizes)) == 5,
        "preempted": engine.stats.preemptions > 0,
        "prefix-hit": engine.stats.cached_tokens >= 4 * (1 + 2 + 3 + 4),
    }
    assert happened.get(way, engine.stats.peak_pages_held >= LONGEST)  # the small pools are filled


def test_sampled_alone_and_together(decoder: Decoder) -> None:
    requests = [request(f"r{i}", prompt(5 + 4 * i, i), SAMPLED, seed=i) for i in range(4)]
    alone = {r.id: answers(run_checked(engine_over(decoder), [r]))[r.id] for r in requests}
    assert answers(run_checked(engine_over(decoder), requests)) == alone
    assert answers(run_checked(engine_over(decoder, pages=11), requests)) == alone
