"""Random answers that follow a mask: what a model with random weights would write, without any model."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from checkpoint_tokenizers import write_tokenizer
from minicpm_cli.grammar.grammars import Grammars
from minicpm_cli.text.tokenizer import Tokenizer, load_tokenizer
from minicpm_cli.types import SamplingParams

CLOSING = (b'"', b"}", b"]", b")", b">")
FAMILIES = ("minicpm4-0.5b", "minicpm5-1b")  # SentencePiece with bytes, byte-level


class Answering:
    """A sink of a model that does not think."""

    thinking = False


@cache
def tokenizer(family: str = FAMILIES[0]) -> Tokenizer:
    folder = Path(mkdtemp())
    write_tokenizer(folder, family)
    return load_tokenizer(folder)


@cache
def grammars(family: str = FAMILIES[0]) -> Grammars:
    return Grammars(tokenizer(family), tokenizer(family).eos_ids_hint)


def allowed(mask: object, size: int) -> list[int]:
    """The tokens that a mask lets through for a model with `size` tokens."""
    row = np.full(-(-size // 32), -1, np.int32)
    mask.fill(row)  # type: ignore[attr-defined]
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
    return [int(i) for i in np.flatnonzero(bits)]


def walk(
    params: SamplingParams,
    seed: int,
    family: str = FAMILIES[0],
    most: int = 4000,
    rules: str | None = None,
    begun: str = "",
    until: str | None = None,
) -> str | None:
    """A random answer that goes on from `begun`, up to `until` if that comes; None if it does not end within `most`
    tokens. Ends and closing marks are likelier.
    """
    known, chance = tokenizer(family), random.Random(seed)
    mask = grammars(family).mask(replace(params, think=False), Answering(), rules=rules)
    assert mask is not None
    data = b""
    for token in known.encode(begun, control=True):
        assert token in allowed(mask, known.vocab_size), f"{known.piece(token)!r} may not follow {data!r}"
        mask.accept(token)
        data += known.piece(token)
    for _ in range(most):
        if until is not None and data.endswith(until.encode()):
            return data.decode()
        tokens = allowed(mask, known.vocab_size)
        assert tokens, f"nothing may follow {data!r}"
        closing = [t for t in tokens if t in known.eos_ids_hint or known.piece(t) in CLOSING]
        closing += [t for t in tokens if t in known.control_ids]
        token = chance.choice(closing if closing and chance.random() < 0.3 else tokens)
        if token in known.eos_ids_hint:
            return data.decode()
        assert rules is not None or token not in known.control_ids
        data += known.piece(token)
        if mask.accept(token) == "stop":
            return data.decode()
    return None
