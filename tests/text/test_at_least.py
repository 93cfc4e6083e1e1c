"""The least length of an answer as a mask of tokens."""

from __future__ import annotations

import numpy as np

from minicpm_cli.text.at_least import AtLeast


class Other:
    """Allows what is odd, and ends at 7."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def fill(self, row: np.ndarray) -> None:
        row[:] = np.int32(-1431655766)  # 0xaaaaaaaa

    def accept(self, token: int) -> str | None:
        self.told.append(token)
        return "stop" if token == 7 else None


def allowed(mask: AtLeast, words: int = 2) -> set[int]:
    row = np.full(words, -1, np.int32)
    mask.fill(row)
    return {token for token in range(32 * words) if row[token // 32] >> (token % 32) & 1}


def test_the_ends_may_not_come_among_the_first_tokens() -> None:
    mask = AtLeast(2, [3, 31, 40, 63, 64])
    every = set(range(64))
    for _ in range(2):
        assert allowed(mask) == every - {3, 31, 40, 63}
        assert mask.accept(5) is None
    assert allowed(mask) == every


def test_another_mask_is_asked_too() -> None:
    other = Other()
    mask = AtLeast(1, [3], other)  # type: ignore[arg-type]
    odd = set(range(1, 64, 2))
    assert allowed(mask) == odd - {3}
    assert mask.accept(5) is None
    assert allowed(mask) == odd
    assert mask.accept(7) == "stop"
    assert other.told == [5, 7]
