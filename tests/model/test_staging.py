"""Tensors that go to a GPU through pinned buffers arrive as they were, once each, and leave no thread behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.errors import WeightsError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model import staging
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.loader import build_decoder, load_model
from minicpm_cli.model.source import open_source
from minicpm_cli.model.staging import CHUNK, SMALL, Coming, StagedSource, Staging

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, SMALL // 14, CHUNK // 14, CHUNK // 14 + 1, 40 * CHUNK // 14 + 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_bytes_arrive_unchanged(rows: int, dtype: torch.dtype) -> None:
    stored = torch.randint(-(2**15), 2**15, (rows, 7), dtype=torch.int16).to(dtype)
    stage = Staging(torch.device("cuda", 0), threads=3)
    placed = [stage.begin(stored).wait() for _ in range(3)]
    stage.close()
    assert all(p.device.type == "cuda" and p.dtype == dtype and torch.equal(p.cpu(), stored) for p in placed)


@on_gpu
def test_other_layouts_go_the_plain_way() -> None:
    stored = torch.randn(700, 900).T
    stage = Staging(torch.device("cuda", 0))
    assert torch.equal(stage.begin(stored).wait().cpu(), stored)
    stage.close()


@on_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_what_is_there_already_stays(name: str) -> None:
    stored, stage = torch.randn(700, 900, device=name), Staging(torch.device(name))
    assert torch.equal(stage.begin(stored).wait(), stored)
    assert stage.begin(stored.cpu()).wait().device == stored.device
    stage.close()


class Shelf:
    """Tensors by name, and in which order they were taken."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.order = tensors, []

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.order.append(name)
        if self.tensors[name].shape != shape:
            raise WeightsError(f"{name} is of another shape")
        return self.tensors[name]

    def raw(self, name: str) -> torch.Tensor:
        self.order.append(name)
        return self.tensors[name]

    def finish(self) -> None:
        pass


class Plain:
    """Stages nothing: tensors stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self.closed = 0

    def begin(self, stored: torch.Tensor) -> Coming:
        assert not self.closed
        return Coming(stored)

    def close(self) -> None:
        self.closed += 1


def test_nothing_is_copied_twice_however_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "Staging", Plain)
    shelf = Shelf({f"t{i}": torch.full((4, 2), i) for i in range(9)})
    shapes = [(f"t{i}", (4, 2)) for i in range(9)]
    source = StagedSource(shelf, torch.device("cuda"), [*shapes, *shapes])
    assert int(source.raw("t3")[0, 0]) == 3  # before anything is begun
    assert int(source.take("t5", (4, 2))[0, 0]) == 5
    for i in (0, 8):
        assert int(source.raw(f"t{i}")[0, 0]) == i
    for i in (1, 2, 4, 6, 7):
        assert int(source.take(f"t{i}", (4, 2))[0, 0]) == i
    source.finish()
    assert sorted(shelf.order) == sorted(shelf.tensors)


def waiting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_closing_ends_the_threads_and_what_is_still_to_be_copied() -> None:
    stage, begun, go, done = Staging(torch.device("cpu"), threads=1), threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        go.wait(10)

    stage._threads.submit(first)
    later = [stage._threads.submit(done.append, i) for i in range(3)]
    begun.wait(10)
    threading.Timer(0.05, go.set).start()
    stage.close()
    assert waiting_threads() == done == []
    assert all(task.cancelled() for task in later)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("quantize", [None, "w8"])
def test_a_load_that_fails_leaves_nothing_behind(
    tmp_path: Path, device: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle, and at a tensor that is missing."""
    path = write_checkpoint(tmp_path, "minicpm-1b", fmt="safetensors", layers=2)
    cfg, here = Checkpoint.read(path).cfg, torch.device(device)
    scheme = LoadScheme.of(quantize, None)
    if device == "cpu":
        monkeypatch.setattr(staging, "Staging", Plain)

    def stop(done: int, layers: int) -> None:
        raise KeyboardInterrupt

    for error, change in ((KeyboardInterrupt, {}), (WeightsError, {"layers": 3})):
        source = open_source(path, replace(cfg, **change), None, torch.device("cuda"))
        assert isinstance(source, StagedSource)
        with pytest.raises(error):
            build_decoder(
                source, replace(cfg, **change), here, torch.bfloat16, stop if not change else None, scheme=scheme
            )
        assert waiting_threads() == []
        assert source._coming == {}
        if device == "cpu":
            assert source._staging.closed == 1


@on_gpu
def test_what_is_begun_ahead_is_what_is_taken() -> None:
    shelf = Shelf({f"t{i}": torch.full((3000, 1001), i, dtype=torch.float32) for i in range(30)})
    shelf.tensors["odd"] = torch.ones(3, 3)
    shapes = [(f"t{i}", (3000, 1001)) for i in range(30)]
    source = StagedSource(shelf, torch.device("cuda"), [("absent", (1, 1)), ("odd", (4, 4)), *shapes])
    taken = [source.take(name, shape) for name, shape in [*shapes[9::-1], *shapes[10:]]]
    with pytest.raises(WeightsError, match="odd is of another shape"):
        source.take("odd", (4, 4))
    source.finish()
    assert [int(t.min()) for t in taken] == [int(t.max()) for t in taken] == [*range(9, -1, -1), *range(10, 30)]
    assert sorted(shelf.order) == sorted(["odd", "odd", *(name for name, _ in shapes)])


@on_gpu
def test_a_model_loads_the_same_on_both_devices(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm-1b", fmt="sharded", layers=2, exact=True)
    cfg = Checkpoint.read(path).cfg
    here, there = (load_model(path, cfg, torch.device(d), torch.bfloat16) for d in ("cpu", "cuda:0"))
    for a, b in zip(here.blocks, there.blocks, strict=True):
        assert torch.equal(a.mlp.gate_up.dequantize(), b.mlp.gate_up.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.attention.qkv.dequantize(), b.attention.qkv.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.mlp_norm.weight, b.mlp_norm.weight.cpu())
