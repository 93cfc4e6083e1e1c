"""Reads tokenizer.model files: the little of protobuf that sentencepiece_model.proto uses, so neither is needed."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minicpm_cli.errors import TokenizerError
from minicpm_cli.text.spm import spm_tokenizer

_UNIGRAM, _BPE = 1, 2


def tokenizer_from_sentencepiece(path: Path, *, legacy: bool) -> dict[str, Any]:
    """The tokenizer.json that a sentencepiece model amounts to. Raises TokenizerError."""
    try:
        return _tokenizer(path.read_bytes(), path, legacy)
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path}: not a sentencepiece model ({error}). Download the file again.") from error


def _tokenizer(data: bytes, path: Path, legacy: bool) -> dict[str, Any]:
    pieces, trainer, rules = [], {}, {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), _float(piece.get(2)), piece.get(3, 1)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            rules = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"{path}: sentencepiece model type {kind} is not supported; BPE and unigram are.")
    texts, scores, types = zip(*pieces, strict=True)
    normalizer = _normalizer(rules)
    prefix = bool(rules.get(3, 1))
    return spm_tokenizer(
        texts, scores, types, add_prefix=prefix, legacy=legacy, unigram=kind == _UNIGRAM, normalizer=normalizer
    )


def _normalizer(rules: dict[int, Any]) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if rules.get(2):
        charsmap = base64.b64encode(rules[2]).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if rules.get(4, 1) and rules.get(2):
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _float(raw: Any) -> float:
    return 0.0 if raw is None else float(struct.unpack("<f", raw)[0])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and value of each protobuf field: int for varints, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"damaged at byte {at}")
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
