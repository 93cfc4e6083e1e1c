"""Our tokenizer as llguidance's: the bytes of each token, and which of them are no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minicpm_cli.text.tokenizer import Tokenizer

_BEFORE = "\n"  # behind it no tokenizer adds a space of its own


class _Wrapped:
    """What llguidance asks of a tokenizer. Where a grammar leaves no choice, `__call__` says how the model would write
    it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: list[int]) -> None:
        count = max(tokenizer.vocab_size, *(i + 1 for i in eos_ids))
        self.tokens = [tokenizer.piece(i) for i in range(count)]
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({*tokenizer.control_ids, *eos_ids})
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._ids = {piece: i for i, piece in reversed([*enumerate(self.tokens)]) if piece and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes | str) -> list[int]:
        written = data if isinstance(data, bytes) else data.encode()
        before = self._tokenizer.encode(_BEFORE, control=False)
        try:
            ids = self._tokenizer.encode(_BEFORE + written.decode(), control=False)
        except UnicodeDecodeError:
            return self._greedy(written)
        ids = ids[len(before) :]
        return ids if b"".join(self.tokens[i] for i in ids) == written else self._greedy(written)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest tokens from the left. What no token begins is left out, as it can never be written."""
        ids, place = [], 0
        while place < len(data):
            sizes = range(min(self._longest, len(data) - place), 0, -1)
            size = next((n for n in sizes if data[place : place + n] in self._ids), 0)
            if size:
                ids.append(self._ids[data[place : place + size]])
            place += size or 1
        return ids


def wrapped(tokenizer: Tokenizer, eos_ids: Iterable[int]) -> Any:
    """An LLTokenizer. Without any end token, one beyond the vocabulary stands for the end, which nothing can draw."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    ends = sorted(eos_ids) or [tokenizer.vocab_size]
    return LLTokenizer(TokenizerWrapper(_Wrapped(tokenizer, ends)), eos_token=ends)
