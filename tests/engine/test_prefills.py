"""Prompts on static buffers: what was captured for consecutive pages is not replayed over others."""

from __future__ import annotations

from array import array

import pytest
import torch
from engine_cases import GREEDY, prompt, request, run_checked
from lagged_cases import WAYS, lagged_engine
from torch import Tensor

from minicpm_cli.engine.graphs import DeviceDraw, Work
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.plan import Chunk
from minicpm_cli.engine.prefills import PrefillSteps
from minicpm_cli.engine.sequence import EngineRequest, Sequence
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.types import SamplingParams

CPU, PAGE, VOCAB = torch.device("cpu"), 4, 50


def chunk(pages: list[int], tokens: int) -> Chunk:
    request = EngineRequest("a", tuple(range(tokens)), SamplingParams(temperature=0), 0)
    seq = Sequence(request, 1, 0.0)
    seq.add_pages(pages)
    assert seq.pages == array("i", pages)
    return Chunk(seq, 0, tokens, True)


def test_consecutive_pages_are_captured_apart() -> None:
    captured, ran = list[bool](), list[tuple[bool, bool]]()

    def run(batch: ForwardBatch) -> Tensor:  # as a kernel that is compiled for pages in a row
        table = batch.page_table[0, :3].tolist()
        ran.append((min(batch.runs) >= 0, table == list(range(table[0], table[0] + 3))))
        return torch.zeros(1, VOCAB)

    def capture(work: Work) -> Work:
        captured.append(True)
        return work

    steps = PrefillSteps(10, PAGE, CPU, run, DeviceDraw(None, Penalties(VOCAB, CPU, 1)), capture)
    row, apart = chunk([3, 4, 5], 11), chunk([3, 5, 4], 11)
    for each in (row, row, apart, apart, row, apart):
        host = steps.build(each, 16, pinned=False)
        steps.launch(host, 16, "greedy")
    assert len(captured) == 2
    assert ran == [(flag, flag) for flag in (True, True, False, False, True, False)]


@pytest.mark.parametrize("place", [7, 9])
@pytest.mark.parametrize("way", WAYS)
def test_scores_that_are_not_finite_end_their_request_and_no_other(way: str, place: int) -> None:
    """Of a prompt or of an answer, alone, beside decodes or a part of another prompt; and the row is used again."""
    engine, decoder = lagged_engine(way, max_seqs=2)
    bad = prompt(7, 3)

    def spoil(history: list[int], logits: Tensor) -> Tensor:
        return logits * torch.nan if history[:7] == list(bad) and len(history) == place else logits

    decoder.spoil = spoil
    asked = [request(f"r{i}", bad if i in (0, 3) else prompt(90 if i == 1 else 5 + i, i), GREEDY) for i in range(6)]
    ends = {event.id: event for event in run_checked(engine, asked) if event.finish}
    assert {name for name, event in ends.items() if event.error} == {"r0", "r3"}
    assert all(
        event.usage and event.usage.completion_tokens == (place - 7 if event.error else 12) for event in ends.values()
    )
