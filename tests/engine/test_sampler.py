"""The sampler against transformers' processors: which tokens are kept, with what probability, how they are drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minicpm_cli.engine import sampler
from minicpm_cli.engine.draws import uniforms
from minicpm_cli.engine.masks import apply_bitmask
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.sampler import Rows, sample, settle
from minicpm_cli.engine.sequence import EngineRequest, Sequence
from minicpm_cli.types import SamplingParams

CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=7),
    SamplingParams(top_k=10**9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=5.0, top_p=0.99),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.5),
    SamplingParams(temperature=0.01, top_p=0.95),
]


def rows_of(params: list[SamplingParams], seed: int = 0, index: int = 0) -> Rows:
    return Rows.of(params, [seed] * len(params), [index] * len(params), CPU)


def theirs(logits: Tensor, p: SamplingParams) -> Tensor:
    """The distribution [V] that transformers draws from, in float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    return warpers(None, logits[None].double())[0].softmax(-1)


def ours(logits: Tensor, p: SamplingParams, points: int = 4000) -> dict[int, float]:
    """What the sampler draws at evenly spaced uniforms: each token's share is its probability within 1 / points."""
    rows = rows_of([p] * points)
    rows.uniform.copy_((torch.arange(points, dtype=torch.float64) + 0.5) / points)
    many = logits.expand(points, -1)
    ids = torch.tensor(settle(sample(many, rows), many, rows)[0])
    tokens, counts = ids.unique(return_counts=True)
    return dict(zip(tokens.tolist(), (counts / points).tolist(), strict=True))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [11, 700])
def test_probabilities_are_those_of_transformers(params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    want, got = theirs(logits, params), ours(logits, params)
    shares = torch.zeros(vocab, dtype=torch.float64)
    for token, share in got.items():
        shares[token] = share
    assert float(shares[want == 0].sum()) == 0, "a token was drawn that is filtered out"
    assert float((shares - want).abs().max()) <= 1.01 / 4000
    assert all(token in got for token in torch.nonzero(want > 1.01 / 4000).flatten().tolist())


@pytest.mark.parametrize("params", PARAMS[2:], ids=str)
@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
def test_the_kept_set_is_exactly_that_of_transformers(params: SamplingParams, spread: float) -> None:
    """Looks at the threshold itself, at a vocabulary where candidates do and do not hold the mass."""
    vocab = 5000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).double().mul(spread).float()
    want = theirs(logits, params) > 0
    rows = rows_of([params])
    _, scores = sampler._scores(logits[None], rows)
    weights = scores.exp()
    threshold, _ = sampler._threshold(sampler._falling(scores), sampler._falling(weights), weights, rows)
    kept = (scores >= threshold[:, None])[0]
    assert int((kept != want).sum()) <= (1 if spread < 1 else 0)  # float32 against float64 at the edge of a flat mass
    assert int(kept.sum()) >= 1


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 3.0])
def test_candidates_change_nothing(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick way and the whole sort give the same tokens, whether or not the candidates were enough."""
    count = 64
    logits = torch.randn(count, 3000, generator=torch.Generator().manual_seed(5)) * spread
    rows = Rows.of([PARAMS[2 + i % 10] for i in range(count)], range(count), range(count), CPU)
    draw = sample(logits, rows)
    quick = settle(draw, logits, rows)[0]
    if spread < 1:
        assert not draw.covered.all()
    monkeypatch.setattr(sampler, "CANDIDATES", 3000)
    whole = sample(logits, rows)
    assert whole.covered.all()
    assert quick == settle(whole, logits, rows)[0]


def test_candidates_hold_peaked_rows() -> None:
    logits = torch.randn(8, 40000, generator=torch.Generator().manual_seed(5)) * 4
    assert sample(logits, rows_of([SamplingParams(temperature=0.7, top_p=0.8)] * 8)).covered.all()


def test_ties_across_the_edge_of_the_candidates() -> None:
    """Every token has the same score: top-k keeps them all, as transformers does."""
    logits = torch.zeros(1, 2000)
    got = [
        settle(sample(logits, r), logits, r)[0][0] for i in range(60) for r in [rows_of([SamplingParams(top_k=5)], i)]
    ]
    assert max(got) > 1500
    assert min(got) < 500


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, top_p=0.9, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.0),
        SamplingParams(temperature=2.0, top_k=1),
    ],
    ids=str,
)
def test_argmax_takes_the_lowest_of_equals(params: SamplingParams) -> None:
    logits = torch.randn(3, 1000).clamp(max=1.5)
    logits[:, [900, 77, 300]] = 2.0
    assert settle(sample(logits, rows_of([params] * 3)), logits, rows_of([params] * 3))[0] == [77] * 3


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for tiny in (1e-5, 1e-45, 1e-300):
        assert ours(logits[0], SamplingParams(temperature=tiny)) == {1: 1.0}
    for p in (
        SamplingParams(temperature=1e9),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1e9, top_k=3),
    ):
        assert ours(logits[0], p) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, abs=1e-3)


def test_uniforms_at_the_ends_draw_possible_tokens() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 1.0, -math.inf]] * 2)
    for p in (SamplingParams(), SamplingParams(top_p=0.999)):
        rows = rows_of([p] * 2)
        rows.uniform.copy_(torch.tensor([0.0, 1 - 2.0**-53]))
        assert settle(sample(logits, rows), logits, rows)[0] == [1, 3]


mixed_params = st.sampled_from([*PARAMS, SamplingParams(temperature=0), SamplingParams(top_k=1500)])


@settings(max_examples=40, deadline=None)
@given(
    mates=st.lists(mixed_params, max_size=6), mine=mixed_params, place=st.integers(0, 6), seed=st.integers(0, 2**64 - 1)
)
def test_a_draw_does_not_depend_on_its_mates(
    mates: list[SamplingParams], mine: SamplingParams, place: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**60)
    logits = torch.randn(len(mates) + 1, 1800, generator=generator) * (seed % 5 + 0.2)
    place = min(place, len(mates))
    params = [*mates[:place], mine, *mates[place:]]
    seeds = [9] * len(params)
    seeds[place] = seed
    together = Rows.of(params, seeds, [4] * len(params), CPU)
    alone = Rows.of([mine], [seed], [4], CPU)
    one = logits[place : place + 1]
    assert settle(sample(logits, together), logits, together)[0][place] == settle(sample(one, alone), one, alone)[0][0]


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    seeds, indices = [0, 1, 2**64 - 1, 1, 0], [0, 0, 5, 1, 7]
    together = uniforms(seeds, indices)
    assert [uniforms([s], [i])[0] for s, i in zip(seeds, indices, strict=True)] == together.tolist()
    assert len(set(together.tolist())) == 5
    assert uniforms([1], [2]) == uniforms([1], [2])


@pytest.mark.parametrize("vary", ["seed", "index", "both"])
def test_uniforms_are_uniform(vary: str) -> None:
    """Chi-square over 256 bins, and over pairs of neighbours in 16 x 16 bins; bound: 1 in 10,000."""
    n = 100_000
    u = uniforms(range(n) if vary != "index" else [42] * n, range(n) if vary != "seed" else [3] * n)
    assert 0 <= u.min() < u.max() < 1
    bound = 344.0  # the 0.9999 quantile for 255 degrees of freedom
    assert _chi_square(np.bincount((u * 256).astype(int), minlength=256), n / 256) < bound
    pairs = (u[:-1:2] * 16).astype(int) * 16 + (u[1::2] * 16).astype(int)
    assert _chi_square(np.bincount(pairs, minlength=256), n / 2 / 256) < bound


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_k=12, top_p=0.95)], ids=str)
def test_draws_over_seeds_have_the_right_frequencies(params: SamplingParams) -> None:
    """20,000 seeds; chi-square of the tokens that are expected 5 times and more."""
    n = 20_000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(8)) * 2
    rows = Rows.of([params] * n, range(n), [17] * n, CPU)
    many = logits.expand(n, -1)
    counts = np.bincount(settle(sample(many, rows), many, rows)[0], minlength=40)
    expected = (theirs(logits, params) * n).numpy()
    often = expected >= 5
    assert counts[expected == 0].sum() == 0
    degrees = int(often.sum()) - 1
    chi = (((counts - expected) ** 2)[often] / expected[often]).sum()
    assert chi < degrees + 4 * math.sqrt(2 * degrees)


def _chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_row_spoils_no_other(value: float) -> None:
    logits = torch.randn(len(PARAMS) + 1, 600)
    params = [*PARAMS, SamplingParams(temperature=0)]
    rows = rows_of(params, seed=6)
    good = settle(sample(logits, rows), logits, rows)[0]
    for bad in range(len(params)):
        spoiled = logits.clone()
        spoiled[bad, 5] = value
        tokens, peaks, _ = settle(sample(spoiled, rows), spoiled, rows)
        assert [i for i, peak in enumerate(peaks) if not math.isfinite(peak)] == [bad]
        assert tokens[:bad] + tokens[bad + 1 :] == good[:bad] + good[bad + 1 :]


def test_all_tokens_forbidden_is_told() -> None:
    logits = torch.full((3, 600), -math.inf)
    rows = rows_of([SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0)])
    assert settle(sample(logits, rows), logits, rows)[1] == [-math.inf] * 3


@pytest.mark.parametrize("vocab", [5, 32, 33, 100])
def test_bitmask(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    allowed = generator.random((3, vocab)) < 0.5
    words = np.zeros((3, -(-vocab // 32) * 32), bool)
    words[:, :vocab] = allowed
    packed = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(3, vocab)
    got = apply_bitmask(logits, torch.from_numpy(packed))
    assert torch.equal(got, logits.masked_fill(~torch.from_numpy(allowed), -math.inf))


def sequence(prompt: list[int], **params: float) -> Sequence:
    return Sequence(EngineRequest("a", tuple(prompt), replace(SamplingParams(), **params), 0), 100, 0.0)  # type: ignore[arg-type]


def by_hand(logits: Tensor, prompt: list[int], answer: list[int], p: SamplingParams) -> Tensor:
    scores = logits.clone()
    if p.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)
        scores = processor(torch.tensor([prompt + answer]), scores[None])[0]
    for token in set(answer):
        scores[token] -= answer.count(token) * p.frequency_penalty + p.presence_penalty
    return scores


def test_penalties_follow_the_tokens_of_each_sequence() -> None:
    """A changing batch, rows with and without penalties, sequences that end and rows that are used again."""
    generator = torch.Generator().manual_seed(1)
    vocab = 50
    kinds = [
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.4, "repetition_penalty": 0.8},
        {"repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 1.5},
    ]
    penalties = Penalties(vocab, CPU)
    live: list[tuple[Sequence, list[int]]] = []
    for step in range(40):
        if len(live) < 6:
            live.append((sequence([step % vocab, 3, 3, (7 * step) % vocab], **kinds[step % 5]), []))
        logits = torch.randn(len(live), vocab, generator=generator) * 3
        before = logits.clone()
        got = penalties.apply(logits, [seq for seq, _ in live])
        assert torch.equal(logits, before)
        for row, plain, (seq, answer) in zip(got, logits, live, strict=True):
            want = by_hand(plain, list(seq.request.prompt), answer, seq.request.params)
            assert torch.allclose(row, want, atol=1e-6)
        ids = torch.randint(0, 6, (len(live),), generator=generator)
        penalties.note([seq for seq, _ in live], ids)
        for (seq, answer), token in zip(live, ids.tolist(), strict=True):
            answer.append(token)
            seq.tokens.append(token)
        if step % 4 == 3:
            live.pop(step % len(live))[0].finished = True
    assert len(penalties.counts) <= 8


def test_rows_without_penalties_cost_nothing() -> None:
    penalties = Penalties(50, CPU)
    logits = torch.randn(2, 50)
    assert penalties.apply(logits, [sequence([1]), sequence([2])]) is logits
    assert len(penalties.counts) == 0
