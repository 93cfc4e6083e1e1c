"""Prompt lookup from end to end: the demo copies a text in far fewer steps, and says the same to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.demand import lookup_of
from minicpm_cli.llm.llm import LLM, _notes
from minicpm_cli.model.config import ModelConfig
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


@pytest.mark.parametrize(("asked", "cpu", "taken"), [(None, True, 8), (0, True, 0), (3, True, 3), (None, False, 0)])
def test_where_tokens_are_looked_up(asked: int | None, cpu: bool, taken: int) -> None:
    assert lookup_of(LoadOptions(lookup=asked), cpu=cpu) == taken


def test_a_gpu_does_not_look_up_tokens() -> None:
    """Its decode attention may not read what other rows of the same step store."""
    assert lookup_of(LoadOptions(lookup=3), cpu=False) == 0


def test_a_gpu_says_that_it_does_not_look_up() -> None:
    cfg, gpu = ModelConfig.from_hf(raw_config("minicpm5-1b")), torch.device("cuda")
    asked = [_notes(LoadOptions("demo", lookup=n), cfg, cfg.context, gpu) for n in (None, 0, 6)]
    assert asked[0] == asked[1] == cfg.notes
    assert "--lookup 6 does nothing here" in asked[2][-1]
