"""Tensors that go to a GPU through pinned buffers arrive as they were, whatever their size, type and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from minicpm_cli.errors import WeightsError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.loader import load_model
from minicpm_cli.model.staging import CHUNK, SMALL, StagedSource, Staging

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [0, 1, SMALL // 14, CHUNK // 14, CHUNK // 14 + 1, 40 * CHUNK // 14 + 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_bytes_arrive_unchanged(rows: int, dtype: torch.dtype) -> None:
    stored = torch.randint(-(2**15), 2**15, (rows, 7), dtype=torch.int16).to(dtype)
    staging = Staging(torch.device("cuda", 0), threads=3)
    placed = [staging.begin(stored).wait() for _ in range(3)]
    staging.close()
    assert all(p.device.type == "cuda" and p.dtype == dtype and torch.equal(p.cpu(), stored) for p in placed)


def test_other_layouts_go_the_plain_way() -> None:
    stored = torch.randn(700, 900).T
    staging = Staging(torch.device("cuda", 0))
    assert torch.equal(staging.begin(stored).wait().cpu(), stored)
    staging.close()


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_what_is_there_already_stays(name: str) -> None:
    stored, staging = torch.randn(700, 900, device=name), Staging(torch.device(name))
    assert torch.equal(staging.begin(stored).wait(), stored)
    assert staging.begin(stored.cpu()).wait().device == stored.device
    staging.close()


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

    def finish(self) -> None:
        pass


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


def test_a_model_loads_the_same_on_both_devices(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "minicpm-1b", fmt="sharded", layers=2, exact=True)
    cfg = Checkpoint.read(path).cfg
    here, there = (load_model(path, cfg, torch.device(d), torch.bfloat16) for d in ("cpu", "cuda:0"))
    for a, b in zip(here.blocks, there.blocks, strict=True):
        assert torch.equal(a.mlp.gate_up.dequantize(), b.mlp.gate_up.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.attention.qkv.dequantize(), b.attention.qkv.dequantize().cpu())  # type: ignore[union-attr]
        assert torch.equal(a.mlp_norm.weight, b.mlp_norm.weight.cpu())
