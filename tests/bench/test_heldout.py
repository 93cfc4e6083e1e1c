"""The built-in text: where its windows lie, and the number that the demo model must give on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minicpm_cli.bench import heldout
from minicpm_cli.bench.quality import Reader, perplexity
from minicpm_cli.errors import UsageError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.loader import load_model
from minicpm_cli.text.tokenizer import load_tokenizer


class Letters:
    """A token a character."""

    def encode(self, text: str, *, control: bool) -> list[int]:
        assert not control, "the text is plain"
        return list(map(ord, text))


def test_the_text_is_the_topics_in_order() -> None:
    text = heldout.text()
    assert len(text) == 400_000
    assert text.startswith('The "assert" statement\n**********************\n')
    assert text.index("\n\n\nAssignment statements\n") < text.index("Boolean operations\n****")


def test_windows_begin_at_the_middle_token() -> None:
    found = heldout.heldout(Letters())  # type: ignore[arg-type]
    ids = list(map(ord, heldout.text()))
    assert [(len(window.ids), window.first, len(window.predicted)) for window in found] == [(512, 1, 511)] * 6
    for number, window in enumerate(found):
        start = 200_000 + 2048 * number
        assert list(window.ids) == ids[start : start + 512]


def test_the_held_out_half_begins_there_too() -> None:
    assert heldout.tokens(Letters()) == list(map(ord, heldout.text()))[200_000:]  # type: ignore[arg-type]


def test_too_few_tokens_are_named() -> None:
    assert len(heldout.spaced(list(range(10752)))) == 6
    with pytest.raises(UsageError, match="has 10751 tokens for this model, and 10752 are needed"):
        heldout.spaced(list(range(10751)))


def test_a_python_without_the_topics_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match="give --text FILE"):
        heldout.text()


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the text is another one in each Python")
def test_the_demo_model_gives_the_published_number(demo_gguf: Path) -> None:
    decoder = load_model(demo_gguf, Checkpoint.read(demo_gguf).cfg, torch.device("cpu"), torch.float32)
    found = perplexity(Reader(decoder), heldout.heldout(load_tokenizer(demo_gguf)))
    assert found.tokens == 6 * 511
    assert found.value == pytest.approx(15.24, abs=0.01)
