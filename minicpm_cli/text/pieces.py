"""The raw bytes of every token: what a streaming decoder needs, since a token may be half a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def piece_table(raw: dict[str, Any]) -> tuple[list[bytes], bool, bool]:
    """The bytes of each id of a tokenizer.json, whether its tokens can write every byte, and whether it is byte-level.

    Byte-level BPE is taken back through its alphabet; otherwise U+2581 is a space and <0xNN> a byte. Added tokens
    are their text.
    """
    byte_level = _mentions(raw.get("decoder"), "ByteLevel") or _mentions(raw.get("pre_tokenizer"), "ByteLevel")
    tokens = _tokens(raw["model"]["vocab"])
    added = {int(t["id"]): t["content"] for t in raw.get("added_tokens", ())}
    size = max([*tokens, *added], default=-1) + 1
    to_bytes = _from_byte_level if byte_level else _from_sentencepiece
    table = [to_bytes(tokens[i]) if i in tokens else b"" for i in range(size)]
    for ident, text in added.items():
        table[ident] = (text if byte_level else text.replace(_SPACE, " ")).encode()
    complete = byte_level or sum(1 for t in tokens.values() if _BYTE_TOKEN.fullmatch(t)) == 256
    return table, complete, byte_level


def _tokens(vocab: Any) -> dict[int, str]:
    if isinstance(vocab, dict):
        return {int(ident): text for text, ident in vocab.items()}
    return {ident: text for ident, (text, _) in enumerate(vocab)}


def _mentions(part: Any, kind: str) -> bool:
    if isinstance(part, dict):
        return part.get("type") == kind or any(_mentions(p, kind) for p in part.values())
    return isinstance(part, list) and any(_mentions(p, kind) for p in part)


def _from_sentencepiece(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _from_byte_level(text: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[c] for c in text])
    except KeyError:
        return text.encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE (GPT-2, section 2.2): printable Latin-1 is itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(rest)}
