"""A mask of tokens as a row of int32 words, 32 tokens a word."""

from __future__ import annotations

from typing import Any


def bit(place: int) -> int:
    """As a signed word of 32 bits has it."""
    return 1 << place if place < 31 else -(1 << 31)


def put(row: Any, token: int, *, allowed: bool) -> None:
    """A model may have fewer tokens than its tokenizer."""
    word, one = token // 32, bit(token % 32)
    if word < len(row):
        row[word] = row[word] | one if allowed else row[word] & ~one
