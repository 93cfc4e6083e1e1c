"""A calibration text of four kinds, from what every installation has; nothing of the held-out text is in it.

Help topics before the held-out half, source code, docstrings, licences; as many tokens of each.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

from minicpm_cli.bench import heldout
from minicpm_cli.text.tokenizer import Tokenizer

TOKENS = 24_576  # of each kind
MODULE = 12_000  # characters of a module's source: many modules, not much of each
LEAST = 8_000, 200  # bytes of a module and characters of a docstring that are worth reading
SEED = 0


def four_texts(tokenizer: Tokenizer) -> str:
    """The same text for the same Python and torch."""
    kinds = (_topics(tokenizer), _sources(), _docstrings(), _licences())
    return "\n\n".join(_cut(tokenizer, text) for text in kinds)


def _cut(tokenizer: Tokenizer, text: str) -> str:
    ids = tokenizer.encode(text, control=False)
    assert len(ids) >= TOKENS, f"only {len(ids)} tokens of a kind that begins with {text[:60]!r}"
    return tokenizer.decode(ids[:TOKENS])


def _topics(tokenizer: Tokenizer) -> str:
    held_out = len(heldout.tokens(tokenizer))
    return tokenizer.decode(tokenizer.encode(heldout.text(), control=False)[:-held_out])


def _sources() -> str:
    return "\n\n".join(path.read_text(encoding="utf-8")[:MODULE] for path in _modules())


def _docstrings() -> str:
    found = [doc for path in _modules() for doc in _documented(path)]
    random.Random(SEED).shuffle(found)
    return "\n\n".join(found)


def _licences() -> str:
    texts = {f.read_text() for f in files("torch") or () if "licenses" in f.parts}
    return "\n\n".join(sorted(texts))


def _modules() -> list[Path]:
    """The standard library's own, shuffled."""
    found = sorted(p for p in Path(sysconfig.get_path("stdlib")).glob("*.py") if p.stat().st_size > LEAST[0])
    random.Random(SEED).shuffle(found)
    return found


def _documented(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > LEAST[1]:
                yield text
