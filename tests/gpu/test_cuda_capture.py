"""What may happen while a graph is captured: the end of another, in this thread and in others; a failure."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from minicpm_cli.bench import kernels
from minicpm_cli.bench.kernel_cases import Sizes
from minicpm_cli.bench.shapes import SHAPES
from minicpm_cli.kernels.capture import captured
from minicpm_cli.model.config import ModelConfig

pytestmark = pytest.mark.gpu


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


@pytest.fixture(autouse=True)
def eager_collector() -> Iterator[None]:
    """Every object made may start a collection."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


def graph_of(x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    x + 1  # what is done once at first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        y = x + 1
    graph.replay()
    return graph, y


def test_a_graph_that_nobody_holds_ends_after_the_capture() -> None:
    x = torch.zeros(8, device="cuda")
    graph, garbage = torch.cuda.CUDAGraph(), Cycle(graph_of(x))
    with captured(graph):
        del garbage
        many = [[] for _ in range(100)]  # type: ignore[var-annotated]
        y = x + 2
    graph.replay()
    assert many
    assert y.tolist() == [2.0] * 8
    assert gc.isenabled()


def test_another_thread_may_end_a_graph_meanwhile() -> None:
    x = torch.zeros(8, device="cuda")
    graph, held = torch.cuda.CUDAGraph(), [graph_of(x)]
    with captured(graph):
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        y = x + 2
    graph.replay()
    assert y.tolist() == [2.0] * 8


def test_a_failed_capture_tells_why_and_spoils_nothing_after_it() -> None:
    device, said = torch.device("cuda"), list[str]()
    sizes = Sizes(ModelConfig.from_hf(dict(SHAPES["minicpm-2b"])), device, torch.bfloat16)

    def waits() -> list[kernels.Case]:
        x = sizes.random(8)
        return [kernels.Case("waits", "GB/s", 1.0, [lambda: x.sum().item()])]

    def fine() -> list[kernels.Case]:
        x = sizes.random(8)
        return [kernels.Case("fine", "GB/s", 1.0, [lambda: x + 1])]

    limits: dict[kernels.Unit, float] = {"GB/s": 1.0, "TFLOP/s": 1.0}
    made = [k.name for k in kernels.tried([("waits", waits), ("fine", fine)], limits, device, said.append)]
    assert made == ["fine"]
    assert len(said) == 1
    assert "not permitted when stream is capturing" in said[0]
    assert "\n" not in said[0]
