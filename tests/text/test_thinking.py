"""A model that would think for ever answers once its budget is used up."""

from __future__ import annotations

import numpy as np
import pytest

from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.thinking import think_budget
from minicpm_cli.types import Channel, SamplingParams

VOCABULARY = 300


class Bytes:
    """A tokenizer of 256 byte tokens and the control tokens that it is given."""

    def __init__(self, *control: str) -> None:
        self.control_text = {text: 256 + n for n, text in enumerate(control)}
        self.control_ids = frozenset(self.control_text.values())
        self._texts = {ident: text for text, ident in self.control_text.items()}

    def piece(self, ident: int) -> bytes:
        return bytes([ident]) if ident < 256 else self._texts[ident].encode()

    def encode(self, text: str, *, control: bool) -> list[int]:
        return list(text.encode())


TAGGED = Bytes("<think>", "</think>")
OTHERS = Bytes("<|thought_start|>", "<|thought_end|>")
PLAIN = Bytes()


def asked(
    tokenizer: Bytes, budget: int | None, wish: list[int], start: Channel = "answer"
) -> tuple[str, str, list[int]]:
    """What a model thinks and answers that wishes these tokens and takes others only where it must."""
    sink = TextSink(tokenizer, channel_start=start)  # type: ignore[arg-type]
    mask = think_budget(SamplingParams(think_budget=budget), tokenizer, sink)  # type: ignore[arg-type]
    taken: list[int] = []
    while wish:
        row = np.full(-(-VOCABULARY // 32), -1, np.int32)
        if mask:
            mask.fill(row)
        free = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCABULARY]
        token = wish.pop(0) if free.all() else int(free.argmax())
        assert free[token]
        assert free.all() or free.sum() == 1
        taken.append(token)
        sink.push(token)
        if mask:
            mask.accept(token)
    texts = {"think": "", "answer": ""}
    for channel, text in sink.close():
        texts[channel] += text
    return texts["think"], texts["answer"], taken


def ids(tokenizer: Bytes, *texts: str) -> list[int]:
    return [
        i
        for text in texts
        for i in ([tokenizer.control_text[text]] if text in tokenizer.control_text else text.encode())
    ]


@pytest.mark.parametrize(
    ("tokenizer", "tags"), [(TAGGED, ("<think>", "</think>")), (OTHERS, tuple(OTHERS.control_text))]
)
def test_what_is_thought_ends_with_the_budget(tokenizer: Bytes, tags: tuple[str, str]) -> None:
    thought, answer, taken = asked(tokenizer, 5, ids(tokenizer, tags[0], "abcdefgh"))
    assert (thought, answer) == ("abcde", "fgh")
    assert taken == ids(tokenizer, tags[0], "abcde\n", tags[1], "\n\nfgh")


def test_tags_that_are_no_tokens_are_spelled() -> None:
    thought, answer, taken = asked(PLAIN, 3, ids(PLAIN, "<think>abcdef"))
    assert (thought, answer) == ("abc", "def")
    assert bytes(taken) == b"<think>abc\n</think>\n\ndef"


@pytest.mark.parametrize(
    ("budget", "wish", "start", "shown"),
    [
        (0, ("<think>", "abc"), "answer", ("", "abc")),
        (0, ("abc",), "think", ("", "abc")),
        (2, ("abcd",), "think", ("ab", "cd")),
        (3, ("<think>", "ab", "</think>", "c"), "answer", ("ab", "c")),
        (9, ("no thought here",), "answer", ("", "no thought here")),
        (None, ("<think>", "ab" * 50), "answer", ("ab" * 50, "")),
        (3, ("<think>", "ab", "</think>", "c", "<think>", "def"), "answer", ("abd", "cef")),
    ],
)
def test_budgets(budget: int | None, wish: tuple[str, ...], start: Channel, shown: tuple[str, str]) -> None:
    thought, answer, _ = asked(TAGGED, budget, ids(TAGGED, *wish), start)
    assert (thought, answer) == shown


def test_half_a_character_is_not_lost() -> None:
    thought, answer, _ = asked(TAGGED, 4, ids(TAGGED, "<think>", "你好", "x"))
    assert thought == "你\ufffd", "the budget counts tokens, and the fourth begins a character"
    assert answer.endswith("x")


@pytest.mark.parametrize(("budget", "thought", "spent"), [(3, "abcdef", True), (9, "abc", False), (0, "abc", False)])
def test_it_tells_whether_thoughts_were_cut(budget: int, thought: str, spent: bool) -> None:
    """A budget of 0 cuts none: there are to be none."""
    sink = TextSink(TAGGED)  # type: ignore[arg-type]
    mask = think_budget(SamplingParams(think_budget=budget), TAGGED, sink)  # type: ignore[arg-type]
    assert mask is not None
    for token in [TAGGED.control_text["<think>"], *thought.encode()]:
        if not mask.forced:
            sink.push(token)
            mask.accept(token)
    assert mask.spent is spent
