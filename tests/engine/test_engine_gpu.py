"""Sampling and the engine's copies on a GPU give what the CPU gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_cases import GREEDY, SAMPLED, answers, expected, prompt, request, run_checked
from lagged_cases import PaddedFake

from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.engine.graphs import CudaCapture
from minicpm_cli.engine.sampler import Rows, sample, settle
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.types import SamplingParams

pytestmark = pytest.mark.gpu
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=4.0, top_p=0.97),
    SamplingParams(top_k=40, min_p=0.02),
    SamplingParams(top_k=3000),
]


class GpuFake(PaddedFake):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = torch.device("cuda")

    def forward(self, batch: ForwardBatch, kv: object) -> torch.Tensor:
        assert batch.ids.is_cuda
        assert batch.page_table.is_cuda
        names = ("ids", "positions", "slots", "q_start", "kv_len", "page_table", "last")
        there = replace(batch, **{name: getattr(batch, name).cpu() for name in names})
        return super().forward(there, kv).cuda()


def test_tokens_are_those_of_the_cpu() -> None:
    count = 60
    logits = torch.randn(count, 70_000, generator=torch.Generator().manual_seed(2)) * 3
    params = [KINDS[i % len(KINDS)] for i in range(count)]
    here, there = (Rows.of(params, range(count), range(count), torch.device(d)) for d in ("cpu", "cuda"))
    on_gpu = logits.cuda()
    got = settle(sample(on_gpu, there), on_gpu, there)[0]
    assert sum(a != b for a, b in zip(got, settle(sample(logits, here), logits, here)[0], strict=True)) <= 1


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(4, 70_000, device="cuda")
    logits[:, [60_000, 777, 30_000]] = 1.0
    rows = Rows.of([SamplingParams(temperature=0)] * 4, [0] * 4, [0] * 4, logits.device)
    assert settle(sample(logits, rows), logits, rows)[0] == [777] * 4


@pytest.mark.parametrize("pages", [200, 12])
def test_engine(pages: int) -> None:
    decoder = GpuFake(pages, 4)
    config = EngineConfig(pages=pages, page_size=4, max_seqs=8, max_batch_tokens=7, context=400, graphs=False)
    requests = [request(f"r{i}", prompt(5 + 3 * i, i % 2), GREEDY if i % 2 else SAMPLED, seed=i) for i in range(7)]
    assert answers(run_checked(Engine(decoder, None, config), requests)) == {r.id: expected(r) for r in requests}


def test_work_that_waits_for_the_device_is_not_captured() -> None:
    x, sums = torch.ones(3, device="cuda"), list[float]()

    def ahead() -> None:
        x.add_(1)

    def waits() -> None:
        sums.append(float(x.sum()))

    capture = CudaCapture()
    replay = capture(ahead)
    torch.cuda.synchronize()
    before = float(x[0])
    replay()
    assert float(x[0]) == before + 1
    assert capture(waits) is waits
    assert capture(ahead) is not ahead
    count = len(sums)
    waits()
    assert sums[count:] == [3 * float(x[0])]
