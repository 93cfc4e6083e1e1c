"""Prompt lookup from end to end: the demo copies a text in far fewer steps, and says the same to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.engine.memory_workspace import Form
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.demand import lookup_of, wanted
from minicpm_cli.llm.llm import LLM, _notes
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Message, Request

CODE = """def area(width, height):
    return width * height

def perimeter(width, height):
    return 2 * (width + height)

def diagonal(width, height):
    return (width ** 2 + height ** 2) ** 0.5
"""
ASKED = f"Repeat this code exactly, without any change:\n```python\n{CODE}```"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_demo_copies(demo_gguf: Path, temperature: float) -> None:
    texts = []
    for lookup in (0, None):
        llm = LLM.open(LoadOptions(device="cpu", ctx=512, lookup=lookup), ModelFiles("demo", demo_gguf))
        llm._engine._clock = lambda: 0.0  # a busy machine's steps would be thought dear
        params = replace(llm.defaults, temperature=temperature, seed=1, max_tokens=60)
        events = list(llm.stream([Request("a", (Message("user", ASKED),), params)]))
        texts.append("".join(event.text for event in events))
        steps, speculated = llm._engine.stats.steps, llm.speculated
        if lookup == 0:
            assert speculated.drafts == 0
        else:
            usage = events[-1].usage
            assert usage is not None
            assert speculated.mean_accepted > 2
            assert usage.completion_tokens / steps > 2
    assert texts[0] == texts[1]


def test_only_where_it_is_asked_for(load) -> None:  # type: ignore[no-untyped-def]
    assert load()._engine.config.lookup == 0
    assert load(lookup=None)._engine.config.lookup == 8
    assert load(lookup=3)._engine.config.lookup == 3


@pytest.mark.parametrize(
    ("asked", "form", "taken"),
    [
        (None, Form(cpu=True), 8),
        (None, Form(packed=True, cpu=True), 8),
        (0, Form(cpu=True), 0),
        (3, Form(cpu=True), 3),
        (None, Form(), 7),
        (None, Form(packed=True), 0),
        (12, Form(packed=True), 12),
        (0, Form(), 0),
    ],
)
def test_where_tokens_are_looked_up(asked: int | None, form: Form, taken: int) -> None:
    assert lookup_of(LoadOptions(lookup=asked), form) == taken
    assert wanted(LoadOptions(lookup=asked), form).lookup == taken


@pytest.mark.parametrize("looks_up", [True, False])
def test_what_was_asked_for_and_is_not_done_is_said(looks_up: bool) -> None:
    cfg, gpu = ModelConfig.from_hf(raw_config("minicpm5-1b")), torch.device("cuda")
    asked = [
        _notes(LoadOptions("demo", lookup=n), cfg, cfg.context, gpu, looks_up=looks_up and n != 0) for n in (None, 0, 6)
    ]
    assert asked[0] == asked[1] == cfg.notes
    assert ("--lookup 6 does nothing here" in "".join(asked[2])) is not looks_up


def test_a_model_whose_rows_come_out_otherwise_is_not_looked_up_for(load, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert load(lookup=3)._engine.looks_up
    assert not load()._engine.looks_up
    monkeypatch.setattr(Decoder, "alike_rows", 1)
    llm = load(lookup=3)
    assert not llm._engine.looks_up
    assert "--lookup 3 does nothing here" in llm.info.notes[-1]
    events = list(llm.stream([Request("a", "one two one two", replace(llm.defaults, max_tokens=5))]))
    assert events[-1].finish is not None
    assert llm.speculated.drafts == 0
