"""The GPU's draws against the CPU's: the same token wherever rounding does not decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minicpm_cli.engine import sampler
from minicpm_cli.engine.draws import uniforms
from minicpm_cli.engine.inputs import DrawState
from minicpm_cli.engine.masks import apply_bitmask
from minicpm_cli.engine.sampler import Rows, sample, settle
from minicpm_cli.types import SamplingParams

pytest.importorskip("triton", reason="the kernels are written in it")

import triton
import triton.language as tl
from sampling_emulated import Emulated

from minicpm_cli.kernels.sampling import Draws, draws_for
from minicpm_cli.kernels.sampling_parts import uniform_of
from minicpm_cli.kernels.sampling_triton import Shape, TritonDraws
from quant.kernels import targets

CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=7),
    SamplingParams(top_k=10**9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=5.0, top_p=0.99),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.5, top_k=150, top_p=0.5),
    SamplingParams(temperature=0.01, top_p=0.95),
    SamplingParams(top_p=0.8, min_p=0.05),
    SamplingParams(temperature=3.0, top_k=1),
    SamplingParams(temperature=3.0, top_p=0.0),
]
ROUNDING = 2e-6  # of a cumulative mass in float32 weights, relative to the whole


Make = Callable[[int, int], Draws]  # of rows and vocabulary


def narrow(_: int) -> Shape:
    """Several chunks of a small vocabulary, and either way through the passes."""
    return Shape(256, 4, 4, 4, many=100)


def emulated(blocks: int = 2, listed: int = 100) -> Draws:
    return Draws(Emulated(listed=listed, blocks=blocks))


@pytest.fixture(params=["triton", "cuda"])
def make(request: pytest.FixtureRequest, kernel_device: str) -> Make:
    """The kernels in Triton; that in CUDA C++, without a GPU emulated."""
    if request.param == "triton":
        return lambda rows, vocab: Draws(TritonDraws(rows, vocab, kernel_device, narrow))
    if kernel_device == "cpu":
        return lambda rows, vocab: emulated()
    if why := targets.unavailable(torch.device("cuda", 0)):
        pytest.skip(why)
    return lambda rows, vocab: draws_for(rows, vocab, kernel_device)


def state_of(params: list[SamplingParams], seeds: list[int], indices: list[int], device: str) -> DrawState:
    return DrawState(
        seed=torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).to(device),
        index=torch.tensor(indices, device=device),
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
    )


def acceptable(logits: Tensor, params: list[SamplingParams], seeds: list[int], indices: list[int]) -> list[set[int]]:
    """What the CPU draws from each row, also with its uniform number and top_p moved by what rounding may move."""
    found: list[set[int]] = [set() for _ in params]
    for of_u, of_p in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
        rows = Rows.of(params, seeds, indices, CPU)
        rows.uniform.add_(of_u * ROUNDING).clamp_(0, 1 - 2**-53)
        rows.top_p.mul_(1 + of_p * ROUNDING)
        for tokens, token in zip(found, settle(sample(logits, rows), logits, rows)[0], strict=True):
            tokens.add(token)
    return found


def assert_drawn(logits: Tensor, params: list[SamplingParams], device: str, draws: Make | Draws) -> None:
    seeds, indices = [2**64 - 1 - 7 * i for i in range(len(params))], [5 * i for i in range(len(params))]
    draws = draws if isinstance(draws, Draws) else draws(*logits.shape)
    with np.errstate(over="ignore"):  # the interpreter's numpy tells of it
        ids, peak = draws(logits.to(device), state_of(params, seeds, indices, device))
    wanted = acceptable(logits.float(), params, seeds, indices)
    assert [token in tokens for token, tokens in zip(ids.tolist(), wanted, strict=True)] == [True] * len(params)
    assert peak.tolist() == logits.float().amax(-1).tolist()


@pytest.mark.parametrize(("vocab", "spread"), [(300, 0.02), (1000, 1.0), (700, 8.0)])
def test_mixed_rows(vocab: int, spread: float, kernel_device: str, make: Make) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(PARAMS), vocab, generator=generator) * spread
    assert_drawn(logits, PARAMS, kernel_device, make)


@pytest.mark.parametrize("rows", [1, 9])
def test_each_shape(rows: int, kernel_device: str) -> None:
    """Five chunks and fewer, as the GPU has them; the rows lie apart, as columns of a padded head."""
    padded = torch.randn(rows, 5003, generator=torch.Generator().manual_seed(rows)) * 2
    params = [SamplingParams(temperature=0.8, top_p=0.8), *PARAMS[2:]][:rows]
    assert_drawn(padded[:, :5000], params, kernel_device, Draws(TritonDraws(rows, 5000, kernel_device)))


def test_ties_are_kept_together(kernel_device: str, make: Make) -> None:
    """bfloat16 has few values: every edge cuts through equals. In half the rows all tokens are equal."""
    logits = torch.randn(len(PARAMS), 700, generator=torch.Generator().manual_seed(2)).mul(0.2).bfloat16()
    logits[::2] = 1.5
    assert_drawn(logits, PARAMS, kernel_device, make)
    assert_drawn(logits.roll(1, 0), PARAMS, kernel_device, make)


def test_forbidden_tokens(kernel_device: str, make: Make) -> None:
    """Whole chunks of -inf, and fewer tokens than top-k asks for."""
    logits = torch.randn(len(PARAMS), 900, generator=torch.Generator().manual_seed(4)) * 3
    logits[:, :600] = -math.inf
    logits[:, 603:] = -math.inf
    assert_drawn(logits, PARAMS, kernel_device, make)


@pytest.mark.parametrize("value", [-200.0, 3.4e38])
def test_scores_far_apart(value: float, kernel_device: str, make: Make) -> None:
    logits = torch.randn(len(PARAMS), 600, generator=torch.Generator().manual_seed(6))
    logits[:, ::2] += min(0, value)
    logits[:, 333] = abs(value)
    assert_drawn(logits, PARAMS, kernel_device, make)


def test_extreme_parameters(kernel_device: str, make: Make) -> None:
    params = [
        SamplingParams(temperature=1e30),
        SamplingParams(temperature=1e30, top_p=0.5),
        SamplingParams(temperature=1e-30, top_p=0.5),
        SamplingParams(temperature=1e-30, top_k=5),
        SamplingParams(top_p=1 - 1e-12),
        SamplingParams(top_p=1e-12),
        SamplingParams(top_k=299, top_p=0.9999),
        SamplingParams(temperature=1e9, top_k=3, min_p=1e-9),
    ]
    logits = torch.randn(len(params), 300, generator=torch.Generator().manual_seed(7))
    assert_drawn(logits, params, kernel_device, make)


def test_argmax_takes_the_lowest_of_equals(kernel_device: str, make: Make) -> None:
    logits = torch.full((3, 1000), -1.0)
    logits[:, [900, 300, 77]] = torch.tensor([[2.0] * 3, [0.0, 0.0, -0.0], [-0.5] * 3])
    draws, there = make(3, 1000), logits.to(kernel_device)
    state = state_of([SamplingParams(temperature=0)] * 3, [0] * 3, [0] * 3, kernel_device)
    assert [draws(there, state)[0].tolist(), draws.greedy(there)[0].tolist()] == [[77] * 3] * 2


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_one_bad_row_spoils_no_other(value: float, kernel_device: str, make: Make) -> None:
    logits = torch.randn(len(PARAMS), 600, generator=torch.Generator().manual_seed(6))
    seeds, indices = list(range(len(PARAMS))), [3] * len(PARAMS)
    state = state_of(PARAMS, seeds, indices, kernel_device)
    spoiled = logits.clone()
    spoiled[::3, 555] = value
    spoiled[1] = -math.inf
    ids, peak = make(len(PARAMS), 600)(spoiled.to(kernel_device), state)
    bad = [row % 3 == 0 or row == 1 for row in range(len(PARAMS))]
    assert [not math.isfinite(p) for p in peak.tolist()] == bad
    assert peak.cpu().nan_to_num(5.0).tolist()[:2] == [
        5.0 if math.isnan(value) else torch.finfo().max,
        torch.finfo().min,
    ]
    assert all(0 <= token < 600 for token in ids.tolist())
    wanted = acceptable(logits, PARAMS, seeds, indices)
    assert all(token in tokens for token, tokens, b in zip(ids.tolist(), wanted, bad, strict=True) if not b)


def test_memory_is_used_again(kernel_device: str, make: Make) -> None:
    """Fewer rows, other rows, the same rows: nothing of an earlier draw is left."""
    draws = make(6, 500)
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 2
    first = [SamplingParams(top_k=9), SamplingParams(top_p=0.3), *PARAMS[:4]]
    for params in (first, [SamplingParams(top_p=0.9)] * 6, first):
        assert_drawn(logits, params, kernel_device, draws)
        assert_drawn(logits[2:5].flip(0), params[:3], kernel_device, draws)


def test_the_engine_draws_so(kernel_device: str) -> None:
    """What the sampler sends to the GPU; extreme temperatures among it, which float32 does not hold."""
    params = [*PARAMS, SamplingParams(temperature=1e300), SamplingParams(temperature=1e-300)]
    logits = torch.randn(len(params), 400, generator=torch.Generator().manual_seed(3)) * 2
    seeds, indices = list(range(len(params))), [2**33] * len(params)
    state = sampler._state(params, seeds, indices, torch.device(kernel_device))
    rows = replace(Rows.of(params, seeds, indices, CPU), state=state)
    there = logits.to(kernel_device)
    with np.errstate(over="ignore"):
        tokens, peaks, ids = settle(sample(there, rows), there, rows)
    wanted = acceptable(logits, params, seeds, indices)
    assert [token in some for token, some in zip(tokens, wanted, strict=True)] == [True] * len(params)
    assert (peaks, ids.tolist()) == (logits.amax(-1).tolist(), tokens)


@triton.jit
def _uniforms(seeds, indices, out):
    row = tl.program_id(0)
    tl.store(out + row, uniform_of(tl.load(seeds + row), tl.load(indices + row)))


def test_uniform_numbers_are_the_hosts(kernel_device: str) -> None:
    seeds, indices = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 12345678901234567890], [0, 2**31, 7, 1, 131071, 3]
    state = state_of([SamplingParams()] * 6, seeds, indices, kernel_device)
    out = torch.empty(6, dtype=torch.float64, device=kernel_device)
    _uniforms[(6,)](state.seed, state.index, out)
    assert out.tolist() == uniforms(seeds, indices).tolist()


@dataclass
class Seats:
    seat: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    counts: Tensor


def by_hand(logits: Tensor, seen: Tensor, p: SamplingParams) -> Tensor:
    changed = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
    of_answer = seen // 2
    return (
        torch.where(seen > 0, changed, logits) - of_answer * p.frequency_penalty - (of_answer > 0) * p.presence_penalty
    )


@pytest.mark.parametrize("masked", [False, True])
def test_penalties_and_mask(masked: bool, kernel_device: str, make: Make) -> None:
    """The logits are changed where they must be, and the drawn tokens counted in the seats of their rows."""
    generator = torch.Generator().manual_seed(9)
    vocab, seats = 601, [2, -1, 0, 3]
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(),
        SamplingParams(top_p=0.7, frequency_penalty=-0.4, repetition_penalty=0.8),
        SamplingParams(presence_penalty=0.7, frequency_penalty=1.5),
    ]
    logits = torch.randn(4, vocab, generator=generator) * 3
    counts = torch.randint(0, 6, (5, vocab), generator=generator, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31 - 1, (4, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    words[1] = -1
    want = torch.stack([by_hand(logits[i], counts[s], params[i]) if s >= 0 else logits[i] for i, s in enumerate(seats)])
    want = apply_bitmask(want, words) if masked else want
    there = Seats(
        torch.tensor(seats, dtype=torch.int32, device=kernel_device),
        *(
            torch.tensor([getattr(p, f"{kind}_penalty") for p in params], dtype=torch.float32, device=kernel_device)
            for kind in ("repetition", "frequency", "presence")
        ),
        counts.clone().to(kernel_device),
    )
    seeds, indices, got = [5, 6, 7, 8], [0, 1, 2, 3], logits.clone().to(kernel_device)
    state = state_of(params, seeds, indices, kernel_device)
    allowed = words.to(kernel_device) if masked else None
    ids, _ = make(4, vocab)(got, state, there, allowed)
    if not torch.equal(got.cpu(), logits):  # changed in place
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6)
    wanted = acceptable(want, params, seeds, indices)
    assert all(t in tokens for t, tokens in zip(ids.tolist(), wanted, strict=True))
    for token, seat in zip(ids.tolist(), seats, strict=True):
        if seat >= 0:
            counts[seat, token] += 2
    assert torch.equal(there.counts.cpu(), counts)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 24])
def test_captured_draws_follow_their_state(rows: int) -> None:
    """A graph captured over one mix of rows draws any other; at the vocabulary of MiniCPM-2B."""
    vocab, generator = 122753, torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    there, draws = logits.cuda(), draws_for(rows, vocab, "cuda")
    state = state_of([SamplingParams(temperature=0)] * rows, [0] * rows, [0] * rows, "cuda")
    draws(there, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = draws(there, state)
    for shift in range(4):
        params = [PARAMS[(row + shift) % len(PARAMS)] for row in range(rows)]
        seeds, indices = [shift + row for row in range(rows)], [shift] * rows
        new = state_of(params, seeds, indices, "cuda")
        for name in ("seed", "index", "temperature", "top_p", "min_p", "top_k"):
            getattr(state, name).copy_(getattr(new, name))
        graph.replay()
        wanted = acceptable(logits, params, seeds, indices)
        assert all(token in tokens for token, tokens in zip(ids.tolist(), wanted, strict=True))
