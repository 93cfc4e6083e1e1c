"""transformers as the peer: greedy tokens as its own `generate` gives them, and only shapes it really has."""

from __future__ import annotations

import pytest
import torch

from minicpm_cli.bench import peer
from minicpm_cli.bench.peer import TransformersRunner, random_peer
from minicpm_cli.bench.shapes import SHAPES, raw_config
from minicpm_cli.errors import UsageError
from minicpm_cli.types import SamplingParams

CPU, FP32 = torch.device("cpu"), torch.float32
TINY = dict(SHAPES["minicpm5-1b"]) | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 64,
}


class Recorder(TransformersRunner):
    """Keeps what each step gave."""

    def __init__(self, model: object) -> None:
        ticks = iter(range(100))
        super().__init__(model, clock=lambda: float(next(ticks)))
        self.tokens: list[list[int]] = []

    def _step(self, ids: torch.Tensor, cache: object, choose: peer.Choose) -> torch.Tensor:
        token = super()._step(ids, cache, choose)
        self.tokens.append(token[:, 0].tolist())
        return token


def test_the_loop_gives_the_tokens_of_generate() -> None:
    torch.manual_seed(0)
    model = random_peer(TINY, CPU, FP32)
    runner = Recorder(model)
    prompts = [(1, 2, 3, 4), (5, 6, 7, 8)]
    run = runner.run(prompts, SamplingParams(temperature=0.0, max_tokens=6))
    expected = model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert [list(column) for column in zip(*runner.tokens, strict=True)] == expected[:, 4:].tolist()
    assert (run.prompt_tokens, run.new_tokens, run.first_seconds, run.total_seconds) == (8, 12, 1.0, 2.0)


def test_more_prompts_than_one_batch_holds_are_drawn_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(peer, "AT_ONCE", 2)
    runner = Recorder(random_peer(TINY, CPU, FP32))
    run = runner.run([(1, 2), (3, 4), (5, 6)], SamplingParams(temperature=0.8, top_p=1e-6, max_tokens=2))
    assert [len(tokens) for tokens in runner.tokens] == [2, 2, 1, 1]
    assert (run.new_tokens, run.first_seconds) == (6, 1.0)
    likeliest = Recorder(runner._model)
    likeliest.run([(1, 2), (3, 4), (5, 6)], SamplingParams(temperature=0.0, max_tokens=2))
    assert runner.tokens == likeliest.tokens, "a top-p of nothing leaves the likeliest"


def test_the_peer_has_the_sizes_of_the_shape() -> None:
    model = random_peer(TINY, CPU, FP32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (16 * 16, 32)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (2 * 16, 32)


@pytest.mark.parametrize("shape", ["minicpm3-4b", "minicpm-moe-8x2b"])
def test_what_is_no_llama_has_no_random_peer(shape: str) -> None:
    with pytest.raises(UsageError, match="choose a dense shape"):
        random_peer(raw_config(shape), CPU, FP32)
