"""Where a growing markdown text is cut into finished blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpm_cli.chat.markdown import Blocks, Code, Piece, Prose, last_code_block

TEXT = """# Title

A para
graph.
## Head
- x
  y
 * z
   1) deep

      more
Lazy
~~~~
~~~
~~~~
2. Two:
   ```py
   a

     b
   ```
after
---

end
***
10. no item
1. item
"""
PIECES = [
    Prose("# Title\n"),
    Prose("A para\ngraph.\n"),
    Prose("## Head\n"),
    Prose("x\ny\n", marker="-"),
    Prose("z\n", gap=False, indent=1, marker="*"),
    Prose("deep\n", gap=False, indent=3, marker="1)"),
    Prose("more\nLazy\n", indent=6),
    Code(("~~~",), "", 0, opens=True, closes=True),
    Prose("Two:\n", marker="2."),
    Code(("a", "", "  b"), "py", 3, opens=True, closes=True),
    Prose("after\n---\n"),
    Prose("end\n"),
    Prose("***\n10. no item\n"),
]


def whole(pieces: list[Piece]) -> list[Piece]:
    """The same, lines of one fence in one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Code) and not piece.opens:
            code = joined.pop()
            assert isinstance(code, Code)
            piece = replace(code, lines=code.lines + piece.lines, closes=piece.closes)
        joined.append(piece)
    return joined


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_pieces_do_not_depend_on_how_the_text_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    blocks = Blocks()
    found = whole([piece for a, b in pairwise(places) for piece in blocks.feed(TEXT[a:b])])
    assert found == PIECES
    assert blocks.preview() == blocks.preview() == blocks.close() == [Prose("item\n", marker="1.")]
    assert blocks.feed("a\n\n") == [Prose("a\n")], "a new text"


def test_code_is_finished_line_by_line() -> None:
    blocks = Blocks()
    assert blocks.feed("```py\na\nb") == [Code(("a",), "py", 0, opens=True)]
    assert blocks.preview() == [Code(("b",), "py", 0)]
    assert blocks.feed("c\n``") == [Code(("bc",), "py", 0)]
    assert blocks.feed("`\n") == [Code((), "py", 0, closes=True)]


LINES = [
    "a",
    "  a",
    "     a",
    "- a",
    "  * a",
    "1. a",
    "7) a",
    "```",
    "```a",
    "   ~~~",
    "- ```",
    "",
    "# a",
    "---",
    "\ta",
]


@given(st.lists(st.sampled_from(LINES), max_size=20).map("\n".join))
def test_no_word_is_lost(text: str) -> None:
    blocks = Blocks()
    kept = "".join(_text(piece) for piece in [*blocks.feed(text), *blocks.close()])
    assert kept.count("a") == text.count("a")


def _text(piece: Piece) -> str:
    return piece.text if isinstance(piece, Prose) else "".join([piece.language * piece.opens, *piece.lines])


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no code", None),
        ("`inline`", None),
        ("```\na\n```\nx\n```py\nb\n\nc\n```\n", "b\n\nc"),
        ("```\na\n```\nx\n```\nstill going", "still going"),
        ("```a`b\nno fence\n", None),
        ("````\n```\n````", "```"),
        ("```\n```", ""),
        ("```\na\n``` x\n```", "a\n``` x"),
        ("1. x:\n   ```py\n   if a:\n     b\n\n   ```\n2. y", "if a:\n  b\n"),
        ("- ```\n  a\n  ```\ntext", "a"),
        ("```\n    ```\n```", "    ```"),
    ],
)
def test_last_code_block(text: str, block: str | None) -> None:
    assert last_code_block(text) == block
