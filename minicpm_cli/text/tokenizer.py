"""Text to token ids and back, such that plain text can never become a control token.

The control tokens of the checkpoint are renamed inside the `tokenizers` object to names that nobody can guess, ids
unchanged. Text is encoded as it is; where a control token is meant, its name is put in its place first. So one call
encodes a whole prompt exactly as the original tokenizer would, and what a user typed stays plain.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from minicpm_cli.errors import RequestError, TokenizerError
from minicpm_cli.text.control import control_tokens, symbols_in_vocab
from minicpm_cli.text.gguf_vocab import vocabulary_from_gguf
from minicpm_cli.text.pieces import piece_table
from minicpm_cli.text.vocabulary import Vocabulary, vocabulary_from_folder

# Tokens that end a turn in the templates of the family and its neighbours, besides the checkpoint's own eos.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>")


class Tokenizer:
    """One checkpoint's tokenizer.

    `control_ids` are the tokens that steer the model (special tokens, and added tokens that look like markup);
    `eos_ids_hint` those that end an answer according to the tokenizer's files alone; `control_text` maps each
    control token's text to its id.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        raw = vocab.tokenizer
        self._pieces, byte_complete, byte_level = piece_table(raw)
        symbols = {} if byte_level else symbols_in_vocab(raw)
        control = control_tokens(raw, vocab.named) | symbols
        self._names = _names(control, symbols)
        self._reserved = re.compile(f"[{''.join(self._names[text] for text in symbols)}]" if symbols else "(?!)")
        self._fast = _build(_renamed(raw, self._names), vocab.origin)
        self._pattern = _longest_first(control)
        self.origin = vocab.origin
        self.vocab_size = len(self._pieces)
        self.control_text = control
        unknown = _unknown_id(raw)
        # A tokenizer without byte pieces writes <unk> for a character that it does not know: that is ordinary then.
        self.control_ids = frozenset(i for i in control.values() if byte_complete or i != unknown)
        self.bos_id = self.token_id(vocab.bos)
        self.add_bos = vocab.add_bos and self.bos_id is not None
        self.eos_ids_hint = self._eos_ids(vocab.eos)
        self.bos_token, self.eos_token = vocab.bos or "", vocab.eos or ""

    def encode(self, text: str, *, control: bool) -> list[int]:
        """The ids of `text`, without BOS. `control` False: the text is plain, no id of `control_ids` comes out."""
        text = self.clean(text)
        return self.encode_named(self.named(text) if control else text)

    def named(self, text: str) -> str:
        """`text` with each control token replaced by its secret name, which `encode_named` understands."""
        return self._pattern.sub(lambda match: self._names[match[0]], text)

    def clean(self, text: str) -> str:
        """`text` without the few characters that stand for control tokens inside this class."""
        return self._reserved.sub("\ufffd", text)

    def encode_named(self, text: str) -> list[int]:
        """The ids of a text in which control tokens stand by their names (see `named`)."""
        try:  # of a batch: other threads run meanwhile, which `encode` does not let them
            ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise RequestError(  # which names nothing of the text: control tokens stand there by their secret names
                "bad_parameter", "the text is no Unicode: it holds bytes that are no UTF-8, or half a surrogate pair"
            ) from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """All at once, control tokens as their text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def piece(self, ident: int) -> bytes:
        """The raw bytes of one token; empty for an id beyond the vocabulary (models pad their output rows)."""
        return self._pieces[ident] if 0 <= ident < len(self._pieces) else b""

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._pieces))

    def piece_text(self, ident: int) -> str:
        """A token for people to read: part of a character shows as \\xNN."""
        return self.piece(ident).decode("utf-8", "backslashreplace")

    def token_id(self, text: str | None) -> int | None:
        """The id of an added token or vocabulary entry by its exact text."""
        if text is None:
            return None
        ident = self.control_text.get(text)
        return ident if ident is not None else self._fast.token_to_id(text)

    def _eos_ids(self, eos: str | None) -> tuple[int, ...]:
        texts = [eos, *(t for t in _TURN_ENDS if t in self.control_text)]
        return tuple(dict.fromkeys(i for i in map(self.token_id, texts) if i is not None))


def load_tokenizer(files: Path) -> Tokenizer:
    """The tokenizer of a folder (tokenizer.json, else tokenizer.model) or of a .gguf file.

    Raises TokenizerError when its files are missing, damaged or of a kind that is not supported.
    """
    if files.is_dir():
        return Tokenizer(vocabulary_from_folder(files))
    return Tokenizer(vocabulary_from_gguf(files))


def _names(control: Iterable[str], symbols: Iterable[str]) -> dict[str, str]:
    """A name for each control token, one that no text contains and no normalizer or pre-tokenizer changes.

    Added tokens: 128 random bits between noncharacters. Symbols of the vocabulary itself: one character from the end
    of Unicode's private area, so that the model meets it as one symbol; `clean` takes these out of every text.
    """
    secret = secrets.token_hex(16)
    names = {text: f"\ufdd0{secret}x{n:x}\ufdd1" for n, text in enumerate(control)}
    return names | {text: chr(0x10FFFD - n) for n, text in enumerate(symbols)}


def _longest_first(control: Iterable[str]) -> re.Pattern[str]:
    texts = sorted(control, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")


def _build(raw: dict[str, Any], origin: str) -> FastTokenizer:
    try:
        fast = FastTokenizer.from_str(json.dumps(raw, ensure_ascii=False))
    except Exception as error:
        raise TokenizerError(f"{origin}: the tokenizer cannot be built: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    return fast


def _unknown_id(raw: dict[str, Any]) -> int | None:
    model = raw["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    vocab = model["vocab"]
    found = vocab.get(model.get("unk_token")) if isinstance(vocab, dict) else None
    return None if found is None else int(found)


def _renamed(raw: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The tokenizer.json with control tokens under their names, and no merge that leads to or from one."""
    model = dict(raw["model"])
    model["vocab"] = _renamed_vocab(model["vocab"], names)
    if "merges" in model:
        model["merges"] = _harmless_merges(model["merges"], names)
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [_renamed_added(token, names) for token in raw.get("added_tokens", ())]
    without = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**raw, "model": model, "added_tokens": added, **without}


def _renamed_vocab(vocab: Any, names: dict[str, str]) -> Any:
    if isinstance(vocab, dict):
        return {names.get(text, text): ident for text, ident in vocab.items()}
    return [[names.get(text, text), score] for text, score in vocab]


def _harmless_merges(merges: Sequence[Any], names: dict[str, str]) -> list[Any]:
    kept = []
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if left + right not in names and left not in names and right not in names:
            kept.append(merge)
    return kept


def _renamed_added(token: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    name = names.get(token["content"])
    if name is None:
        return token
    # single_word and normalized would keep a name from being found.
    return {**token, "content": name, "single_word": False, "normalized": False, "special": True}
