"""A run tells whoever watches its memory in which phase it is, and writes down what each one took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import engine_of, prompt, request, run_checked

from checkpoints import write_checkpoint
from minicpm_cli.engine.memory_ledger import Phase, past
from minicpm_cli.engine.memory_meter import MemoryMeter
from minicpm_cli.errors import OutOfMemory
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm import watch
from minicpm_cli.llm.llm import LLM
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Message, Request, SamplingParams


class Watching:
    """Notes the phases as they change, and gives its own advice."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.asked: list[tuple[int, int]] = []

    def enter(self, phase: Phase) -> None:
        if self.phases[-1:] != [phase]:
            self.phases.append(phase)

    def advice(self, tokens: int, seqs: int) -> str:
        self.asked.append((tokens, seqs))
        return "Take less."


def test_phases_of_a_run() -> None:
    engine, _ = engine_of()
    engine.memory = watching = Watching()
    run_checked(engine, [request("a", prompt(9)), request("b", prompt(30, 1))])
    assert watching.phases == ["prefill", "decode"]
    run_checked(engine, [request("c", prompt(100, 2))])
    assert watching.phases == ["prefill", "decode", "prefill", "decode"]


def test_who_watches_is_asked_what_would_fit() -> None:
    engine, decoder = engine_of()
    engine.memory = watching = Watching()

    def fail(step: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    decoder.before_step = fail
    events = run_checked(engine, [request("a", prompt(9)), request("b", prompt(30, 1))])
    errors = [event.error for event in events if event.error]
    assert len(errors) == 2
    assert all(isinstance(error, OutOfMemory) and str(error).endswith("Take less.") for error in errors)
    assert watching.asked == [(2, 2)]
    assert len(run_checked(engine, [request("c", prompt(9))])) == 12, "the process goes on"


class Growing(MemoryMeter):
    """In a process that has freed much before, a phase need not take anything that the system sees."""

    def settle(self) -> None:
        super().settle()
        self.peaks = {phase: (taken or 1, reserved) for phase, (taken, reserved) in self.peaks.items()}


@pytest.mark.parametrize("options", [{}, {"quantize": "w8"}])
def test_a_closed_model_leaves_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    monkeypatch.setattr(watch, "MemoryMeter", Growing)
    path = write_checkpoint(tmp_path / "model", "minicpm-1b", layers=2)
    files, sizes = ModelFiles("tiny", path), {"device": "cpu", "ctx": 256, "max_seqs": 2}
    llm = LLM.open(LoadOptions(str(path), **sizes | options), files, cache=tmp_path / "cache")  # type: ignore[arg-type]
    list(llm.stream([Request("a", (Message("user", "hello"),), SamplingParams(max_tokens=4, temperature=0.0))]))
    assert past(tmp_path / "cache") == []
    llm.close()
    lines = past(tmp_path / "cache")
    assert {line.phase for line in lines} >= {"prefill", "decode"}
    assert {(line.context, line.seqs, line.kind.device, line.kind.kv) for line in lines} == {(256, 2, "cpu", "bf16")}
    assert all(line.kind.scheme.startswith(options.get("quantize", "bf16")) for line in lines)
    assert all(line.predicted > 0 and line.time > 0 and "torch" in line.kind.versions for line in lines)


@pytest.mark.gpu
def test_what_was_planned_is_what_is_taken(tmp_path: Path) -> None:
    """On a GPU: within 200 MB, of two layers of a true width and a cache of a gigabyte."""
    path = write_checkpoint(tmp_path / "model", "minicpm-1b", layers=2, exact=True)
    options = LoadOptions(str(path), device="cuda", ctx=4096, max_seqs=16, max_batch_tokens=512)
    llm = LLM.open(options, ModelFiles("wide", path), cache=tmp_path / "cache")
    list(llm.stream([Request("a", (Message("user", "hello " * 900),), SamplingParams(max_tokens=8, temperature=0.0))]))
    llm.close()
    lines = past(tmp_path / "cache")
    assert {line.phase for line in lines} >= {"load", "prefill", "decode"}
    for line in lines:
        assert abs(line.predicted - line.measured) < max(200e6, 0.05 * line.measured), line
