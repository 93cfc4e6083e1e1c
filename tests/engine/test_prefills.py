"""Steps on static buffers: what is captured apart, and what they share."""

from __future__ import annotations

from array import array

import pytest
import torch
from engine_cases import GREEDY, prompt, request, run_checked
from lagged_cases import WAYS, lagged_engine
from torch import Tensor

from minicpm_cli.engine.decode_inputs import DecodeLayout
from minicpm_cli.engine.graphs import DecodeSteps, DeviceDraw, Form, Work
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


def test_the_scores_of_captured_steps_are_left_in_one_place() -> None:
    """Those of each would stay in its graph's memory: 8 rows are of another type, as a model's are."""

    def run(batch: ForwardBatch) -> Tensor:
        count = len(batch.ids)
        return torch.full((count, VOCAB), float(count), dtype=torch.float32 if count <= 8 else torch.bfloat16)

    captured = list[Tensor]()
    steps = DecodeSteps(
        DecodeLayout(64, 10), PAGE, CPU, run, DeviceDraw(None, Penalties(VOCAB, CPU, 64)), lambda work: work
    )
    for rows in (2, 8, 16, 64):
        form = Form(rows, "hosted")
        steps._capture_step(lambda work: work, form)
        steps._step(form)
        assert steps.logits[form].tolist() == [[float(rows)] * VOCAB] * rows
        captured.append(steps.logits[form])
    assert [scores.dtype for scores in captured] == [torch.float32] * 2 + [torch.bfloat16] * 2
    few, few_more, many, most = (scores.untyped_storage().data_ptr() for scores in captured)
    assert few == few_more != many == most


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
