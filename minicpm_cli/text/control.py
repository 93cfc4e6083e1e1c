"""Which tokens of a vocabulary steer the model, so that a user's text must never become one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# <think>, </tool>, <|im_end|>, <用户>, <function, [INST]: markup. Runs of spaces, words, punctuation: text.
_MARKUP = re.compile(r"<[^\s<>].*|\[/?[A-Z_]+\]")
_OPENS = re.compile(r"[<\[]")

# Some vocabularies hold the tags of HTML as a way to write it shortly. That is text.
_HTML = frozenset(
    """
    a abbr b big blockquote body br button caption center cite code col colgroup dd del div dl dt em font footer
    form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins kbd label li link main meta nav object ol
    option p pre q script section select small span strike strong style sub sup table tbody td textarea tfoot th
    thead title tr tt u ul var video
    """.split()  # noqa: SIM905
)
_PIPED = re.compile(r"<\|.+\|>")
_SYMBOLS = frozenset(
    """
    <用户> <AI> <system> <user> <assistant> <s> </s> <bos> <eos> <eot> <eod> <pad> <cls> <sep> <mask> <think>
    </think> <tool_call> </tool_call> <tool_response> </tool_response> <function </function> <param </param>
    """.split()  # noqa: SIM905
)
_TAG = re.compile(r"</?([a-z][a-z0-9]*)\s*/?>?")


def control_tokens(raw: dict[str, Any], named: Iterable[str]) -> dict[str, int]:
    """Text to id of the control tokens of a tokenizer.json: special ones, those in `named`, and markup."""
    added = {t["content"]: t for t in raw.get("added_tokens", ()) if t["content"]}
    wanted = set(named)
    return {
        text: int(token["id"])
        for text, token in added.items()
        if token.get("special") or text in wanted or looks_like_markup(text)
    }


def symbols_in_vocab(raw: dict[str, Any]) -> dict[str, int]:
    """Control tokens that are plain entries of a sentencepiece vocabulary, as <用户> and <AI> of MiniCPM 1 and 2.

    Ordinary merges lead to them. In byte-level vocabularies nothing does, since pre-tokenizers split markup.
    """
    added = {t["content"] for t in raw.get("added_tokens", ())}
    vocab = raw["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((text, i) for i, (text, _) in enumerate(vocab))
    return {t: int(i) for t, i in pairs if t[:1] == "<" and t not in added and _is_symbol(t)}


def _is_symbol(text: str) -> bool:
    return text in _SYMBOLS or _PIPED.fullmatch(text) is not None


def looks_like_markup(text: str) -> bool:
    if not _OPENS.match(text) or not _MARKUP.fullmatch(text):
        return False
    if not any(c.isalpha() for c in text):
        return False
    tag = _TAG.fullmatch(text)
    return tag is None or tag[1] not in _HTML
