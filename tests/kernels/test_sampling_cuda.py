"""What only the CUDA kernel of `sampling` does, emulated: lists that run over, few and many blocks, types of logits."""

from __future__ import annotations

import pytest
import torch
from sampling_emulated import Emulated, library
from test_sampling import PARAMS, assert_drawn, state_of

from minicpm_cli.kernels import sampling_cuda
from minicpm_cli.kernels.sampling import Draws, draws_for
from minicpm_cli.kernels.sampling_triton import TritonDraws
from minicpm_cli.types import SamplingParams
from quant.kernels import targets
from quant.kernels.nvrtc import KernelError

MANY = [
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.8, top_p=0.8, min_p=0.3),
    SamplingParams(top_k=300),
    SamplingParams(top_k=300, top_p=0.7),
    SamplingParams(temperature=3.0, top_p=0.97),
    SamplingParams(top_k=50, top_p=0.7),
]


@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_of_a_row(blocks: int) -> None:
    """The same tokens, whatever the number of blocks; the last of them have nothing to do."""
    logits = torch.randn(len(PARAMS), 1999, generator=torch.Generator().manual_seed(blocks))
    draws = Draws(Emulated(blocks=blocks))
    assert_drawn(logits, PARAMS, "cpu", draws)
    state = state_of(PARAMS, list(range(len(PARAMS))), [0] * len(PARAMS), "cpu")
    assert torch.equal(draws(logits, state)[0], Draws(Emulated(blocks=2))(logits, state)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_types_and_places(dtype: torch.dtype, first: int) -> None:
    """Rows that begin anywhere in 16 bytes, and what lies before and after them counts for nothing."""
    whole = torch.randn(len(PARAMS), 777, generator=torch.Generator().manual_seed(first)).to(dtype)
    logits = whole[:, first : first + 601]
    whole[:, :first] = whole[:, first + 601 :] = 100.0
    assert_drawn(logits, PARAMS, "cpu", Draws(Emulated()))


@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_more_near_the_threshold_than_a_list_holds(offset: float) -> None:
    """Steps of keys, down to a single one where the scores are equal: around 10 bfloat16 has few values."""
    logits = torch.randn(len(MANY), 4999, generator=torch.Generator().manual_seed(1)) * 0.1 + offset
    draws = Draws(Emulated(listed=20))
    assert_drawn(logits, MANY, "cpu", draws)
    assert_drawn(logits.bfloat16(), MANY, "cpu", draws)
    logits[:, 7] = -3e38  # what is counted in steps then lies in the first of them
    assert_drawn(logits, MANY, "cpu", draws)


def test_as_it_is_launched() -> None:
    """A row of MiniCPM-2B's vocabulary with the threads of a GPU's block, whose memory is as large as it is told."""
    logits = torch.randn(3, 122753, generator=torch.Generator().manual_seed(1)) * 0.1
    launched = Emulated(sampling_cuda.THREADS, sampling_cuda.LIST, blocks=1)
    assert_drawn(logits.bfloat16(), MANY[:3], "cpu", Draws(launched))
    assert library(launched.threads, launched.listed).shared_bytes() == sampling_cuda.SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "vocab", "blocks"),
    [(1, 122753, 4), (64, 122753, 2), (256, 122753, 1), (512, 73448, 1), (256, 200000, 2), (1, 600000, 8)],
)
def test_few_rows_have_several_blocks_each(rows: int, vocab: int, blocks: int) -> None:
    assert sampling_cuda.blocks_for(rows, vocab) == blocks


def test_triton_draws_where_it_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*_: object) -> None:
        raise KernelError("a driver that is older than the compiler")

    monkeypatch.setattr(targets, "unavailable", lambda _: None)
    monkeypatch.setattr(sampling_cuda, "kernel", kernel)
    assert isinstance(draws_for(2, 300, "cpu").kernels, TritonDraws)


@pytest.mark.parametrize("listed", [20, 400])
def test_all_filters_at_once(listed: int) -> None:
    """Top-p is of what top-k keeps, also of that which min-p takes away."""
    filters = [(k, p, least) for k in (40, 300) for p in (0.5, 0.9) for least in (0.05, 0.3, 0.7)]
    params = [SamplingParams(temperature=0.8, top_k=k, top_p=p, min_p=least) for k, p, least in filters]
    logits = torch.randn(len(params), 1499, generator=torch.Generator().manual_seed(2)) * 0.5
    assert_drawn(logits, params, "cpu", Draws(Emulated(listed=listed)))
