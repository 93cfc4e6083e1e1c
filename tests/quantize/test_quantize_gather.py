"""Two streams in step: what the quantized layers read, and what the original ones read of the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from checkpoints import checkpoint_config, state_dict, write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.block import Probe
from minicpm_cli.quantize.ends import embedder
from minicpm_cli.quantize.folder import WorkFolder
from minicpm_cli.quantize.gather import Inputs, gather_both
from minicpm_cli.quantize.layers import Stage, block_shapes, stages
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.stream import Stream
from minicpm_cli.quantize.tensors import read_tensors
from minicpm_cli.quantize.walk import Walk
from quant.correction import Shift, Wanted
from steps import relative_error

CPU, FP32 = torch.device("cpu"), torch.float32
Read = dict[str, Tensor]  # by tap, [T, K] float64


def rows(cfg: ModelConfig, count: int = 200, length: int = 12) -> Tensor:  # more than pass at once
    return torch.randint(3, cfg.vocab, (count, length), generator=torch.Generator().manual_seed(2))


def started(cfg: ModelConfig, ids: Tensor, tensors: dict[str, Tensor]) -> Stream:
    stream = Stream(cfg, ids, CPU, FP32)
    stream.start(embedder(cfg, tensors, FP32))
    return stream


class Case:
    """The first block of a family, another one of slightly other weights, and a stream before each."""

    def __init__(self, family: str) -> None:
        self.cfg = cfg = ModelConfig.from_hf(checkpoint_config(family))
        state = state_dict(family, dtype=FP32)
        g = torch.Generator().manual_seed(4)
        self.tensors = {name: state[name] for name in block_shapes(cfg, 0)}
        near = {
            n: t + 0.1 * t.std() * torch.randn(t.shape, generator=g) for n, t in self.tensors.items() if t.dim() > 1
        }
        self.near = self.tensors | near
        ids, embed = rows(cfg), state["model.embed_tokens.weight"]
        moved = embed + 0.1 * embed.std() * torch.randn(embed.shape, generator=g)
        self.ours = started(cfg, ids, {"model.embed_tokens.weight": moved})
        self.theirs = started(cfg, ids, {"model.embed_tokens.weight": embed})

    def probe(self, tensors: dict[str, Tensor]) -> Probe:
        return Probe(self.cfg, 0, tensors, CPU, FP32)

    def probes(self) -> tuple[Probe, Probe]:
        return self.probe(self.near), self.probe(self.tensors)

    def states(self, stream: Stream) -> Tensor:  # [T, H]
        return torch.cat([stream.row(i) for i in range(len(stream.ids))]).double()

    def read(self, stage: Stage, tensors: dict[str, Tensor], stream: Stream, taps: list[str]) -> Read:
        """By looking at one stream alone."""
        seen: dict[str, list[Tensor]] = {tap: [] for tap in taps}
        probe = self.probe(tensors)
        looks: dict[str, Callable[[Tensor], None]] = {tap: seen[tap].append for tap in taps}
        with probe.tapped(looks):
            stream.look(probe, stage.half)
        return {tap: torch.cat(parts).double() for tap, parts in seen.items()}


def check(inputs: Inputs, x: Tensor, aim: type, wanted: Tensor) -> None:
    """Against products in float64."""
    assert inputs.hessian.tokens == len(x)
    assert relative_error(inputs.hessian.matrix, x.T @ x / len(x)) < 1e-5
    assert type(inputs.aim) is aim
    assert inputs.aim.tokens == len(x)
    assert relative_error(inputs.aim.matrix, wanted.T @ x / len(x)) < 1e-5


@pytest.mark.parametrize("family", ["minicpm-2b", "minicpm3-4b", "minicpm5-1b"])
def test_the_difference_between_the_streams_at_every_stage(family: str) -> None:
    case = Case(family)
    found, added = stages(case.cfg, 0, Recipe()), set()
    for stage in found:
        taps = [group.tap for group in stage.groups]
        x, full = case.read(stage, case.near, case.ours, taps), case.read(stage, case.tensors, case.theirs, taps)
        lost = (case.states(case.theirs) - case.states(case.ours)) / case.cfg.residual_scale
        gathered = gather_both(stage, case.probes(), (case.ours, case.theirs), CPU)
        assert list(gathered) == taps
        for group in stage.groups:
            a, b = x[group.tap], full[group.tap]
            if group.adds:
                name = group.layers[0].name
                check(gathered[group.tap], a, Wanted, b @ case.tensors[f"{name}.weight"].double().T + lost)
                added.add(name.rsplit(".", 1)[1])
            else:
                check(gathered[group.tap], a, Shift, b - a)
        if stage.adds:  # the original stream has moved
            case.ours.pass_half(case.probe(case.near), stage.half)
    assert added == {"o_proj", "down_proj"}


def test_an_expert_is_compared_with_itself_on_the_tokens_that_it_gets_now() -> None:
    case = Case("minicpm-moe-8x2b")
    assert case.cfg.moe is not None
    for stream, tensors in ((case.ours, case.near), (case.theirs, case.tensors)):
        stream.pass_half(case.probe(tensors), "attention")
    first, second = (stage for stage in stages(case.cfg, 0, Recipe()) if stage.half == "mlp")
    x, full = (
        case.read(first, tensors, stream, ["mlp.router"])["mlp.router"]
        for tensors, stream in ((case.near, case.ours), (case.tensors, case.theirs))
    )
    routers = [t["model.layers.0.mlp.gate.weight"].double() for t in (case.near, case.tensors)]
    chosen, unmoved = (
        (read @ router.T).topk(case.cfg.moe.active).indices for read, router in zip((x, full), routers, strict=True)
    )
    assert not torch.equal(chosen.sort().values, unmoved.sort().values)  # the routers disagree on some tokens
    lost = (case.states(case.theirs) - case.states(case.ours)) / case.cfg.residual_scale
    for stage in (first, second):
        gathered = gather_both(stage, case.probes(), (case.ours, case.theirs), CPU)
        for number, group in enumerate(stage.groups):
            at = (chosen == number).any(-1)
            if stage is first:
                check(gathered[group.tap], x[at], Shift, full[at] - x[at])
            else:
                inner = [activations(t, number, y[at]) for t, y in ((case.near, x), (case.tensors, full))]
                w2 = case.tensors[f"model.layers.0.mlp.experts.{number}.w2.weight"].double()
                check(gathered[group.tap], inner[0], Wanted, inner[1] @ w2.T + lost[at])


def activations(tensors: dict[str, Tensor], expert: int, x: Tensor) -> Tensor:
    w1, w3 = (tensors[f"model.layers.0.mlp.experts.{expert}.{name}.weight"].double() for name in ("w1", "w3"))
    return functional.silu(x @ w1.T) * (x @ w3.T)


@pytest.mark.parametrize("family", ["minicpm-2b", "minicpm-moe-8x2b"])
def test_the_original_stream_moves_with_the_last_look(family: str) -> None:
    case, other = Case(family), Case(family)
    last = next(stage for stage in stages(case.cfg, 0, Recipe()) if stage.adds)
    gather_both(last, case.probes(), (case.ours, case.theirs), CPU)
    other.theirs.pass_half(other.probe(other.tensors), last.half)
    assert torch.equal(case.states(case.theirs), other.states(other.theirs))
    assert torch.equal(case.states(case.ours), other.states(other.ours))


def walked(path: Path, out: Path, **recipe: Any) -> tuple[Stream, Stream, Stream | None]:
    """The held-out text behind the quantized and the original blocks, and the calibration behind the original ones."""
    cfg = Checkpoint.read(path).cfg
    ids, wanted = rows(cfg, 40, 32), Recipe(group=32, **recipe)
    tensors = read_tensors(path, cfg, {"model.embed_tokens.weight": (cfg.vocab, cfg.hidden_size)})
    calibration, held, original, full = (started(cfg, i, tensors) for i in (ids, ids[:8], ids[:8], ids))
    work = WorkFolder(out)
    work.open({})
    streams = calibration, held, original, full if wanted.corrects else None
    Walk(path, cfg, wanted, CPU, FP32, work, *streams).run(lambda done, what: None)
    work.close()
    return held, original, streams[3]


@pytest.mark.parametrize("skip", [(), ("*.self_attn.*",), ("*.mlp.*",), ("*.o_proj", "*.down_proj")])
def test_whatever_is_skipped_the_original_stream_passes_the_original_blocks(
    tmp_path: Path, skip: tuple[str, ...]
) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm5-1b")
    for _ in range(2):  # anew, and past blocks that are finished
        _, original, full = walked(path, tmp_path / "out", skip=skip)
        assert full is not None
        assert relative_error(full.row(3), original.row(3)) < 1e-6


def test_corrected_weights_lose_less(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm-2b")
    lost = {}
    for correction in (0.0, 0.5):
        held, original, _ = walked(path, tmp_path / str(correction), correction=correction)
        lost[correction] = max(relative_error(held.row(i), original.row(i)) for i in range(8))
    assert lost[0.5] < 0.98 * lost[0.0]
