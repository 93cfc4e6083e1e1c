"""When the grammar holds: after thinking, behind a prefill, up to the end that it knows itself."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from grammar_walks import FAMILIES, Answering, allowed, grammars, tokenizer

from checkpoint_tokenizers import tokenizer_of
from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.grammars import KEPT, Grammars
from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.thinking import think_budget
from minicpm_cli.types import SamplingParams

FIVE = "minicpm5-1b"  # has <think> and </think> as tokens
whole = Grammars._compile
YES = SamplingParams(regex="(yes|no)!?")


def texts(mask: object, family: str = FAMILIES[0], size: int | None = None) -> set[bytes]:
    known = tokenizer(family)
    return {known.piece(i) for i in allowed(mask, size or known.vocab_size)}


def accept(mask: object, text: str, family: str = FAMILIES[0]) -> list[object]:
    ids = {tokenizer(family).piece(i): i for i in reversed(range(tokenizer(family).vocab_size))}
    return [mask.accept(ids[char.encode()]) for char in text]  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_where_nothing_may_follow(family: str) -> None:
    mask = grammars(family).mask(replace(YES, think=False), Answering())
    assert texts(mask, family) >= {b"y", b"n"}
    assert accept(mask, "yes", family) == [None] * 3
    ends = {tokenizer(family).piece(i) for i in tokenizer(family).eos_ids_hint}
    assert texts(mask, family) == {b"!", *ends}, "it may end here, with any end token"
    assert accept(mask, "!", family) == ["stop"]


def test_each_answer_begins_anew() -> None:
    first = grammars().mask(YES, Answering())
    accept(first, "ye")
    assert b"n" in texts(grammars().mask(YES, Answering()))
    assert texts(first) == {b"s"}


def test_thinking_is_free_but_may_not_end_the_answer() -> None:
    known = tokenizer(FIVE)
    sink = TextSink(known, channel_start="think")
    mask = grammars(FIVE).mask(YES, sink)
    free = set(range(known.vocab_size)) - set(known.eos_ids_hint)
    assert set(allowed(mask, known.vocab_size)) == free
    for text in ("hello", "</think>"):
        for token in known.encode(text, control=True):
            sink.push(token)
            assert mask is not None
            assert mask.accept(token) is None
    assert texts(mask, FIVE) >= {b"y", b"n", b"\n"}
    assert accept(mask, "\n", FIVE) == [None]
    assert b"\n" not in texts(mask, FIVE), "once"
    assert accept(mask, "no!", FIVE)[-1] == "stop"


def test_a_model_may_begin_to_think_by_itself_unless_it_is_told_not_to() -> None:
    known, sink = tokenizer(FIVE), TextSink(tokenizer(FIVE))
    opening = known.control_text["<think>"]
    mask = grammars(FIVE).mask(YES, sink)
    assert mask is not None
    assert opening in allowed(mask, known.vocab_size)
    sink.push(opening)
    assert mask.accept(opening) is None
    assert len(allowed(mask, known.vocab_size)) > 100
    told = grammars(FIVE).mask(replace(YES, think=False), TextSink(known))
    assert opening not in allowed(told, known.vocab_size)
    begun = grammars(FIVE).mask(YES, TextSink(known), prefill="y")
    assert texts(begun, FIVE) >= {b"e"}
    assert opening not in allowed(begun, known.vocab_size)


def test_thinking_that_is_closed_by_text_leaves_the_rest_of_its_token_to_the_answer() -> None:
    known = tokenizer()
    sink = TextSink(known, channel_start="think")
    mask = grammars().mask(YES, sink)
    assert mask is not None
    for token in known.encode("</think>", control=False):
        sink.push(token)
        assert mask.accept(token) is None
    assert texts(mask) >= {b"y", b"n"}
    assert not {b"a", b"<"} & texts(mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_budget_of_thinking_comes_first(family: str) -> None:
    known = tokenizer(family)
    params = replace(YES, think_budget=2)
    sink = TextSink(known, channel_start="think")
    mask = grammars(family).mask(params, sink, think_budget(params, known, sink))
    assert mask is not None
    written = b""
    for _ in range(40):
        tokens = allowed(mask, known.vocab_size)
        token = next(t for t in tokens if t not in known.eos_ids_hint)
        sink.push(token)
        written += known.piece(token)
        if mask.accept(token) == "stop":
            break
    sink.close()
    assert written.split(b"</think>")[1].strip() in (b"yes!", b"no!"), written


def test_a_grammar_is_compiled_while_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 schemas at once kept a GPU waiting for 60 ms before its first step."""
    compiled = list[object]()
    monkeypatch.setattr(Grammars, "_compile", lambda self, source: compiled.append(source) or whole(self, source))
    mask = grammars().mask(SamplingParams(regex="(here|there) and only here", think=False), Answering())
    assert not compiled
    assert b"h" in texts(mask)
    assert len(compiled) == 1
    bad = grammars().mask(SamplingParams(regex="("), Answering())
    with pytest.raises(RequestError, match="cannot be used"):
        texts(bad)


def test_an_answer_goes_on_from_its_prefill() -> None:
    schema = SamplingParams(schema=json.dumps({"const": {"name": "Zoë"}}))
    assert texts(grammars().mask(schema, Answering(), prefill='{"name": "Zo')) == {"ë".encode()[:1]}
    with pytest.raises(RequestError, match="begins with 'x'"):
        grammars().mask(schema, Answering(), prefill="x")
    thinks = grammars(FIVE).mask(schema, TextSink(tokenizer(FIVE), channel_start="think"), prefill="I think")
    assert thinks is not None, "what a model thinks is no part of the answer"


def test_a_model_may_have_more_or_fewer_tokens_than_its_tokenizer() -> None:
    known = tokenizer()
    more = grammars().mask(YES, Answering())
    assert set(allowed(more, known.vocab_size + 77)) == set(allowed(more, known.vocab_size))
    small = allowed(more, 128)
    assert small == [i for i in allowed(more, known.vocab_size) if i < 128]


def test_a_tokenizer_without_any_end_token() -> None:
    without = Grammars(tokenizer(), ())
    mask = without.mask(SamplingParams(regex="ab?"), Answering())
    assert accept(mask, "a") == [None]
    assert texts(mask) == {b"b"}
    assert accept(mask, "b") == ["stop"]


def test_no_control_token_passes_for_text() -> None:
    for family in FAMILIES:
        mask = grammars(family).mask(SamplingParams(regex="(?s).*", think=False), Answering())
        passed = set(allowed(mask, tokenizer(family).vocab_size))
        control = tokenizer(family).control_ids
        assert passed & control == set(tokenizer(family).eos_ids_hint) & control
        plain = {i for i in range(tokenizer_of(family).size) if i not in control}
        refused = {tokenizer(family).piece(i) for i in plain - passed}
        assert all(len(piece) == 1 and piece[0] >= 0x80 for piece in refused), "bytes that begin no character"


def test_a_grammar_too_large_for_a_step_is_an_error_of_its_request() -> None:
    mask = grammars().mask(SamplingParams(regex="a"), Answering())
    assert mask is not None
    with pytest.raises(RequestError, match="cannot go on"):
        accept(mask, "b")


def test_the_last_grammars_are_kept_and_threads_may_share_them() -> None:
    own = Grammars(tokenizer(), tokenizer().eos_ids_hint)
    failed = []

    def ask(start: int) -> None:
        try:
            for n in range(start, start + 2 * KEPT):
                mask = own.mask(SamplingParams(regex=f"x{n % 100}"), Answering())
                mask.fill(np.zeros(64, np.int32))  # type: ignore[union-attr]
        except Exception as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(own._compiled) <= KEPT
