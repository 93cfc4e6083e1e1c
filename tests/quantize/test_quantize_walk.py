"""What the walk sees and does, against transformers' own layers and the decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from checkpoints import checkpoint_config, state_dict, write_checkpoint
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.kv import KVCache
from minicpm_cli.quantize import plan
from minicpm_cli.quantize.block import Probe
from minicpm_cli.quantize.ends import embedder
from minicpm_cli.quantize.folder import WorkFolder
from minicpm_cli.quantize.layers import block_shapes, stages
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.stream import Stream
from minicpm_cli.quantize.tensors import read_tensors
from minicpm_cli.quantize.walk import HALVES, Walk, part_name
from quant.hessian import Hessian
from steps import decoder_of, forward_batch, relative_error

CPU, FP32 = torch.device("cpu"), torch.float32
FAMILIES = ("minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b", "minicpm5-1b")


def rows(cfg: ModelConfig, count: int = 5, length: int = 12) -> Tensor:
    return torch.randint(3, cfg.vocab, (count, length), generator=torch.Generator().manual_seed(2))


def started(cfg: ModelConfig, ids: Tensor, tensors: dict[str, Tensor]) -> Stream:
    stream = Stream(cfg, ids, CPU, FP32)
    stream.start(embedder(cfg, tensors, FP32))
    return stream


def state_of(family: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    cfg = ModelConfig.from_hf(checkpoint_config(family))
    state = state_dict(family, dtype=FP32)
    return cfg, {name: t for name, t in state.items() if not (cfg.tie and name == "lm_head.weight")}


def block_of(cfg: ModelConfig, index: int, state: dict[str, Tensor]) -> Probe:
    return Probe(cfg, index, {name: state[name] for name in block_shapes(cfg, index)}, CPU, FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_pass_the_blocks_as_sequences_pass_the_decoder(family: str) -> None:
    cfg, state = state_of(family)
    ids = rows(cfg)
    stream = started(cfg, ids, state)
    for index in range(cfg.layers):
        probe = block_of(cfg, index, state)
        for half in HALVES:
            stream.pass_half(probe, half)
    decoder = decoder_of(cfg, state)
    for number, row in enumerate(ids.tolist()):
        kv = KVCache.allocate(cfg, 4, 4, CPU, FP32)
        with torch.inference_mode():
            expected = decoder.hidden(forward_batch([(row, 0)], [[2, 0, 3]], 4, CPU), kv)
        assert relative_error(stream.row(number), expected) < 1e-6


def hooked(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The sum of x x^T of every linear layer's input."""
    sums: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].double().flatten(0, -2)
            sums[name] = sums.get(name, 0) + x.T @ x

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(look(name))
    with torch.inference_mode():
        model(ids)
    return sums


@pytest.mark.parametrize(("family", "kind"), [("minicpm5-1b", "Llama"), ("minicpm3-4b", "MiniCPM3")])
def test_the_inputs_of_every_layer_are_those_that_transformers_sees(family: str, kind: str) -> None:
    raw = {key: value for key, value in checkpoint_config(family).items() if key != "auto_map"}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config").from_dict(raw)).eval()
    cfg, state = state_of(family)
    model.load_state_dict(state_dict(family, dtype=FP32), strict=True)
    ids = rows(cfg)
    expected = hooked(model, ids)
    stream = started(cfg, ids, state)
    seen = 0
    for index in range(cfg.layers):
        probe = block_of(cfg, index, state)
        for half in HALVES:
            for stage in (s for s in stages(cfg, index, Recipe()) if s.half == half):
                hessians = {group.tap: Hessian(group.columns, CPU) for group in stage.groups}
                with probe.tapped({tap: hessian.add for tap, hessian in hessians.items()}):
                    stream.look(probe, half)
                for group in stage.groups:
                    for layer in group.layers:
                        found = hessians[group.tap]
                        assert found.tokens == ids.numel()
                        assert relative_error(found.matrix * found.tokens, expected[layer.name]) < 1e-4, layer.name
                        seen += 1
            stream.pass_half(probe, half)
    assert seen == len([name for name in expected if name != "lm_head"])


def test_taps_leave_no_trace() -> None:
    cfg, state = state_of("minicpm3-4b")
    probe = block_of(cfg, 0, state)
    before = (probe.block.attention.out, probe.block.attention.ops, probe.block.mlp.down)
    with probe.tapped({"attention.out": print, "attention.latent": print, "mlp.down": print}):
        assert probe.block.attention.out is not before[0]
    assert (probe.block.attention.out, probe.block.attention.ops, probe.block.mlp.down) == before


def walk(path: Path, work: WorkFolder, ids: Tensor, **recipe: Any) -> tuple[list[Any], Stream, Stream]:
    cfg = Checkpoint.read(path).cfg
    tensors = read_tensors(path, cfg, {"model.embed_tokens.weight": (cfg.vocab, cfg.hidden_size)})
    calibration, held, original = (started(cfg, i, tensors) for i in (ids, ids[:1], ids[:1]))
    wanted = Recipe(group=32, **recipe)
    full = started(cfg, ids, tensors) if wanted.corrects else None
    made = Walk(path, cfg, wanted, CPU, FP32, work, calibration, held, original, full)
    return made.run(lambda done, what: None), held, original


@pytest.fixture
def work(tmp_path: Path) -> Any:
    folder = WorkFolder(tmp_path / "out")
    folder.open({})
    yield folder
    folder.close()


def test_tokens_are_counted_a_layer_and_an_expert(tmp_path: Path, work: WorkFolder) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm-moe-8x2b")
    cfg, ids = Checkpoint.read(path).cfg, rows(Checkpoint.read(path).cfg, 8, 40)
    reports, _, _ = walk(path, work, ids, force=True)
    counts = {report.name: report.tokens for report in reports}
    assert cfg.moe is not None
    for index in range(cfg.layers):
        experts = [counts[f"model.layers.{index}.mlp.experts.{e}.w2"] for e in range(cfg.moe.experts)]
        assert sum(experts) == cfg.moe.active * ids.numel()
        assert experts == [counts[f"model.layers.{index}.mlp.experts.{e}.w1"] for e in range(cfg.moe.experts)]
        assert counts[f"model.layers.{index}.self_attn.q_proj"] == ids.numel()


def test_an_expert_that_saw_little_is_named_and_rounded(tmp_path: Path, work: WorkFolder) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm-moe-8x2b")
    ids = rows(Checkpoint.read(path).cfg, 2, 12)
    reports, _, _ = walk(path, work, ids, force=True)
    few = [report for report in reports if report.note]
    assert few
    for report in reports:
        little = ".experts." in report.name and report.tokens < 2 * report.columns
        assert (report.note == f"saw {report.tokens} tokens, rounded to nearest") is little, report


def test_a_stage_reads_what_the_quantized_layers_before_it_give(tmp_path: Path, work: WorkFolder) -> None:
    """The second block's inputs, made again with the parts on the disk, give the same solution."""
    path = write_checkpoint(tmp_path / "model", "minicpm5-1b")
    cfg = Checkpoint.read(path).cfg
    ids = rows(cfg, 20, 32)
    walk(path, work, ids)
    first = work.file(part_name(1)).read_bytes()
    work.file(part_name(1)).unlink()
    walk(path, work, ids)
    assert work.file(part_name(1)).read_bytes() == first
    work.file(part_name(1)).unlink()
    work.file(part_name(0)).unlink()
    walk(path, work, ids, method="rtn")
    work.file(part_name(1)).unlink()
    walk(path, work, ids)  # behind a block that was rounded, the same method finds other weights
    assert work.file(part_name(1)).read_bytes() != first


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_that_are_kept_spare_a_pass_and_change_nothing(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "model", family)
    ids = rows(Checkpoint.read(path).cfg, 20, 32)
    written = []
    for limit in (0, plan.LARGEST_KEPT):
        monkeypatch.setattr(plan, "LARGEST_KEPT", limit)
        work = WorkFolder(tmp_path / str(limit))
        work.open({})
        walk(path, work, ids)
        written.append([work.file(part_name(index)).read_bytes() for index in range(2)])
        work.close()
    assert written[0] == written[1]


def test_gptq_loses_less_than_rounding(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm5-1b")
    ids = rows(Checkpoint.read(path).cfg, 30, 32)
    lost = {}
    for method in ("gptq", "rtn"):
        work = WorkFolder(tmp_path / method)
        work.open({})
        _, held, original = walk(path, work, ids, method=method)
        lost[method] = relative_error(held.row(0), original.row(0))
        work.close()
    assert lost["gptq"] < 0.85 * lost["rtn"]


def test_parts_hold_the_reports(tmp_path: Path, work: WorkFolder) -> None:
    path = write_checkpoint(tmp_path / "model", "minicpm5-1b")
    ids = rows(Checkpoint.read(path).cfg, 20, 32)
    reports, held, _ = walk(path, work, ids)
    again, passed, _ = walk(path, work, ids)
    assert again == reports
    assert torch.equal(held.row(0), passed.row(0))
    saved = work.load(part_name(0))
    assert saved is not None
    assert [r["name"] for r in json.loads(saved[1]["layers"])] == [r.name for r in reports[:7]]
