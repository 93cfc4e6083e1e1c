"""What a checkpoint folder says of its tokenizer: a tokenizer.json, its BOS and EOS, and who adds the BOS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicpm_cli.errors import TokenizerError
from minicpm_cli.hub.files import read_json


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in the form of tokenizer.json. `named`: control tokens that only the configuration names."""

    origin: str
    tokenizer: dict[str, Any]
    bos: str | None
    eos: str | None
    add_bos: bool
    named: tuple[str, ...] = ()


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    """From tokenizer.json, else from tokenizer.model (sentencepiece). Raises TokenizerError."""
    from minicpm_cli.text.sentencepiece_model import tokenizer_from_sentencepiece

    config = read_json(folder / "tokenizer_config.json", TokenizerError, required=False)
    special = read_json(folder / "special_tokens_map.json", TokenizerError, required=False)
    if (folder / "tokenizer.json").is_file():
        raw = read_json(folder / "tokenizer.json", TokenizerError)
        _check(raw, folder / "tokenizer.json")
    elif (folder / "tokenizer.model").is_file():
        raw = tokenizer_from_sentencepiece(folder / "tokenizer.model", legacy=config.get("legacy") is True)
        raw = _with_added(raw, _added_tokens(folder, config))
    else:
        raise TokenizerError(
            f"{folder}: no tokenizer.json and no tokenizer.model. Copy the original model's tokenizer files there."
        )
    bos = content(config.get("bos_token")) or content(special.get("bos_token"))
    eos = content(config.get("eos_token")) or content(special.get("eos_token"))
    first = _post_processor_bos(raw, bos)
    bos = bos or first
    named = tuple(t for t in (bos, eos) if t)
    return Vocabulary(str(folder), raw, bos, eos, _adds_bos(config, first is not None), named)


def content(token: Any) -> str | None:
    """A token as configuration files write it: its text, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _check(raw: dict[str, Any], path: Path) -> None:
    model = raw.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not vocab:
        raise TokenizerError(f"{path}: no vocabulary under model.vocab. Download the file again.")


def _adds_bos(config: Mapping[str, Any], by_post_processor: bool) -> bool:
    # As transformers: the Llama classes obey add_bos_token (default true); others run the post-processor alone.
    llama = str(config.get("tokenizer_class", "")).startswith(("Llama", "Gemma", "MiniCPM"))
    explicit = config.get("add_bos_token")
    if explicit is None:
        return llama or by_post_processor
    return bool(explicit) or (by_post_processor and not llama)


def _post_processor_bos(raw: Mapping[str, Any], bos: str | None) -> str | None:
    """The special token that the post-processor puts first, if it is the BOS (or no BOS is known)."""
    for part in _parts(raw.get("post_processor")):
        single = part.get("single")
        first = single[0] if isinstance(single, list) and single else {}
        ident = first.get("SpecialToken", {}).get("id") if isinstance(first, dict) else None
        if ident and bos in (None, ident):
            return str(ident)
    return None


def _parts(processor: Any) -> list[dict[str, Any]]:
    if not isinstance(processor, dict):
        return []
    return [processor, *(p for p in processor.get("processors") or () if isinstance(p, dict))]


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id to (text, special) of the tokens that a folder adds to its sentencepiece model."""
    names = read_json(folder / "added_tokens.json", TokenizerError, required=False)
    added = {int(ident): (text, False) for text, ident in names.items() if isinstance(ident, int)}
    for ident, token in (config.get("added_tokens_decoder") or {}).items():
        text = content(token)
        if text:
            added[int(ident)] = (text, bool(token.get("special")) if isinstance(token, Mapping) else False)
    return added


def _with_added(raw: dict[str, Any], added: Mapping[int, tuple[str, bool]]) -> dict[str, Any]:
    known = {t["id"] for t in raw["added_tokens"]}
    more = [added_token(i, text, special) for i, (text, special) in sorted(added.items()) if i not in known]
    return {**raw, "added_tokens": sorted([*raw["added_tokens"], *more], key=lambda t: int(t["id"]))}


def added_token(ident: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": ident, "content": text, "special": special, **flags}
