"""A text that every Python brings along, for measuring quality where no data set is at hand.

Its second half is held out: calibration may use the first.
"""

from __future__ import annotations

import platform

from minicpm_cli.bench.quality import Window
from minicpm_cli.errors import UsageError
from minicpm_cli.text.tokenizer import Tokenizer

CHARACTERS = 400_000
WINDOWS, SIZE, EVERY = 6, 512, 2048


def name() -> str:
    """The text's name with what decides its content."""
    return f"pydoc topics of Python {'.'.join(platform.python_version_tuple()[:2])}"


def text() -> str:
    """The language's help topics in the order of their keys, blank lines between, cut at CHARACTERS."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("this Python comes without its help topics, the built-in text; give --text FILE") from None
    return "\n\n".join(topics[key] for key in sorted(topics))[:CHARACTERS]


def tokens(tokenizer: Tokenizer) -> list[int]:
    """The held-out half: from the middle token on, without BOS."""
    ids = tokenizer.encode(text(), control=False)
    return ids[len(ids) // 2 :]


def heldout(tokenizer: Tokenizer) -> list[Window]:
    """Six windows of 512 tokens, one every 2048, 511 predicted tokens each."""
    return spaced(tokens(tokenizer))


def spaced(ids: list[int]) -> list[Window]:
    """Raises UsageError for fewer ids than the windows span."""
    span = EVERY * (WINDOWS - 1) + SIZE
    if len(ids) < span:
        raise UsageError(f"the built-in text has {len(ids)} tokens for this model, and {span} are needed")
    return [Window(tuple(ids[start : start + SIZE])) for start in range(0, EVERY * WINDOWS, EVERY)]
