"""The tokenizer that a GGUF file carries in its metadata, as a tokenizer.json.

The names of pre-tokenizers and what they split are llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minicpm_cli.errors import TokenizerError
from minicpm_cli.model.gguf import read_header
from minicpm_cli.text.spm import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, spm_tokenizer
from minicpm_cli.text.vocabulary import Vocabulary, added_token

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"

_GPT2_LIKE = ("", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling")
_DIGITS_LIKE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_LIKE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "minicpm5")
_QWEN2_LIKE = ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez")


def vocabulary_from_gguf(path: Path) -> Vocabulary:
    """Raises TokenizerError for a tokenizer model or a pre-tokenizer that is not known."""
    meta = read_header(path).metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError(f"{path}: the file has no vocabulary (tokenizer.ggml.tokens). Convert the model again.")
    texts = list(tokens)
    types = [int(t) for t in meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)]
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        raw = _byte_level(meta, texts, types, path)
    elif kind == "llama":
        raw = _sentencepiece(meta, texts, types)
    else:
        raise TokenizerError(f"{path}: tokenizer model {kind!r} is not supported; 'llama' and 'gpt2' are.")
    bos, eos = (_token(meta, key, texts) for key in ("bos_token_id", "eos_token_id"))
    spm = kind == "llama"
    # llama.cpp adds BOS for these two unless the file says otherwise.
    default = spm or meta.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe", "pixtral")
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", default))
    return Vocabulary(str(path), raw, bos, eos, add_bos, tuple(t for t in (bos, eos) if t))


def _token(meta: Mapping[str, Any], key: str, texts: Sequence[str]) -> str | None:
    ident = meta.get(f"tokenizer.ggml.{key}")
    return texts[ident] if isinstance(ident, int) and 0 <= ident < len(texts) else None


def _sentencepiece(meta: Mapping[str, Any], texts: list[str], types: list[int]) -> dict[str, Any]:
    scores = list(meta.get("tokenizer.ggml.scores") or [float(-i) for i in range(len(texts))])
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    for key in ("bos_token_id", "eos_token_id"):
        ident = meta.get(f"tokenizer.ggml.{key}")
        if isinstance(ident, int) and 0 <= ident < len(types):
            types[ident] = CONTROL
    return spm_tokenizer(texts, scores, types, add_prefix=prefix)


def _byte_level(meta: Mapping[str, Any], texts: list[str], types: list[int], path: Path) -> dict[str, Any]:
    pre = str(meta.get("tokenizer.ggml.pre") or "")
    ends = (meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id"))
    special = {i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL) or i in ends}
    plain = {i for i, kind in enumerate(types) if kind == USER_DEFINED} - special
    added = [added_token(i, texts[i], i in special) for i in sorted(special | plain)]
    model = {
        "type": "BPE",
        "vocab": {text: i for i, text in enumerate(texts)},
        "merges": [m.split(" ", 1) for m in meta.get("tokenizer.ggml.merges") or ()],
        "ignore_merges": pre in _LLAMA3_LIKE or pre == "tekken",
        "byte_fallback": False,
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": _pre_tokenizer(pre, path),
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": model,
    }


_BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _pre_tokenizer(pre: str, path: Path) -> dict[str, Any]:
    if pre in _GPT2_LIKE:
        return _BYTE_LEVEL | {"use_regex": True}
    if pre in _DIGITS_LIKE:
        digits = {"type": "Digits", "individual_digits": True}
        return _sequence(digits, _BYTE_LEVEL | {"use_regex": True})
    pattern = _LLAMA3 if pre in _LLAMA3_LIKE else _QWEN2 if pre in _QWEN2_LIKE else None
    if pattern is None:
        known = ", ".join(sorted(filter(None, _GPT2_LIKE + _DIGITS_LIKE + _LLAMA3_LIKE + _QWEN2_LIKE)))
        raise TokenizerError(
            f"{path}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known; known are {known}. "
            "Use the model's original folder with its tokenizer.json."
        )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _BYTE_LEVEL | {"use_regex": False})


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}
