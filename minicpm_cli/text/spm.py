"""A tokenizer.json out of a sentencepiece vocabulary: pieces, scores and types of a GGUF or a tokenizer.model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minicpm_cli.text.vocabulary import added_token

# Types of pieces: sentencepiece_model.proto; GGUF uses the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"


def spm_tokenizer(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_prefix: bool,
    legacy: bool = True,
    unigram: bool = False,
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The tokenizer.json of a sentencepiece model.

    `add_prefix`: a space goes before the text; `legacy`: also after every added token, as Llama 1 and 2 had it.
    BPE takes the pair whose merged piece has the highest score, so merges are ranked by it.
    """
    texts = _texts(pieces, types)
    unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    model: dict[str, Any] = {"byte_fallback": BYTE in types}
    if unigram:
        model |= {"type": "Unigram", "unk_id": unknown, "vocab": list(map(list, zip(texts, scores, strict=True)))}
    else:
        vocab = {text: i for i, text in enumerate(texts)}
        merges = _merges(vocab, texts, scores, types)
        unk = None if unknown is None else texts[unknown]
        model |= {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": unk, "fuse_unk": True}
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    added = [added_token(i, texts[i], kind != USER_DEFINED) for i, kind in enumerate(types) if kind in kinds]
    return {
        "version": "1.0",
        "added_tokens": added,
        "model": model,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        **_spaces(add_prefix, legacy, normalizer),
    }


def _texts(pieces: Sequence[str], types: Sequence[int]) -> list[str]:
    """Unique texts; runs of spaces that are user-defined match real spaces."""
    seen: set[str] = set()
    texts = []
    for ident, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        text = piece.replace(_SPACE, " ") if kind == USER_DEFINED else piece
        if not text or text in seen:
            text = f"<unused {ident}>"
        seen.add(text)
        texts.append(text)
    return texts


def _merges(
    vocab: dict[str, int], texts: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[list[str]]:
    ranked = []
    for ident, text in enumerate(texts):
        if types[ident] == NORMAL:
            local = [
                (vocab[text[:cut]], vocab[text[cut:]])
                for cut in range(1, len(text))
                if text[:cut] in vocab and text[cut:] in vocab
            ]
            ranked += [(-scores[ident], ident, pair) for pair in sorted(local)]
    ranked.sort(key=lambda item: item[0])
    return [[texts[left], texts[right]] for _, _, (left, right) in ranked]


def _spaces(add_prefix: bool, legacy: bool, normalizer: dict[str, Any] | None) -> dict[str, Any]:
    before = [normalizer] if normalizer else []
    if legacy:
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if add_prefix else []
        steps = [*before, *prepend, _replace(" ", _SPACE)]
        return {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    scheme = "first" if add_prefix else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return {"normalizer": normalizer, "pre_tokenizer": metaspace}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}
