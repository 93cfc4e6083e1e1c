"""Log-probabilities in the rows of a batch, in each of their formats, with the texts of the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from minicpm_cli.types import Logprob

_Json = dict[str, Any]
_LEAST = -9999.0  # JSON has no -inf; OpenAI writes this number


def _by_number(ident: int) -> bytes:
    """Where there is no vocabulary: the notation of vLLM's return_tokens_as_token_ids."""
    return b"token_id:%d" % ident


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """A token may be a part of a character: as text its bytes are \\xNN then, as in the answers of `minicpm serve`."""

    token_bytes: Callable[[int], bytes] = _by_number

    def simple(self, tokens: Sequence[Logprob]) -> list[_Json]:
        """As `minicpm run --json` has them."""
        return [
            {
                "token": p.token,
                "text": self._text(p.token),
                "logprob": _finite(p.logprob),
                "top": [[ident, _finite(value), self._text(ident)] for ident, value in p.top],
            }
            for p in tokens
        ]

    def chat(self, tokens: Sequence[Logprob]) -> _Json:
        content = [
            self._entry(p.token, p.logprob) | {"top_logprobs": [self._entry(*rival) for rival in p.top]} for p in tokens
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[Logprob]) -> _Json:
        texts = [self._text(p.token) for p in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(p.logprob) for p in tokens],
            "top_logprobs": [{self._text(ident): _finite(value) for ident, value in p.top} for p in tokens],
            "text_offset": [end - len(text) for text, end in zip(texts, accumulate(map(len, texts)), strict=True)],
        }

    def _entry(self, ident: int, value: float) -> _Json:
        return {"token": self._text(ident), "logprob": _finite(value), "bytes": list(self.token_bytes(ident))}

    def _text(self, ident: int) -> str:
        return self.token_bytes(ident).decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
