"""Where a growing markdown text is cut into pieces that can change no more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicpm_cli.chat.code_block import last_code_block
from minicpm_cli.chat.inline import REACH, chunks, inline
from minicpm_cli.chat.markdown import Blocks
from minicpm_cli.chat.pieces import Code, Piece, Prose, Rule, Table, joined

TEXT = """# Title #

A para
graph, **with a
mark** in it.
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

| a | b |
| - | -: |
| 1 | `2` |

| no table

> quoted
> - x
end
10. no item
***
1. item
    code
    more

    code
"""
PIECES: list[Piece] = [
    Prose(("Title",), level=1),
    Prose(("A", " para", "\n", "graph,", " **with a\nmark**", " in", " it.")),
    Prose(("Head",), level=2),
    Prose(("x", "\n", "y"), marker="-"),
    Prose(("z",), gap=False, indent=1, marker="*"),
    Prose(("deep",), gap=False, indent=3, marker="1)"),
    Prose(("more", "\n", "Lazy"), indent=6),
    Code("~~~\n", "", 0, opens=True, closes=True),
    Prose(("Two:",), marker="2."),
    Code("a\n\n  b\n", "py", 3, opens=True, closes=True),
    Prose(("after",)),
    Rule(),
    Table((("a", "b"), ("1", "`2`")), ("left", "right")),
    Prose(("|", " no", " table")),
    Prose(("quoted",), quotes=1),
    Prose(("x",), marker="-", quotes=1),
    Prose(("end", "\n", "10.", " no", " item")),
    Rule(),
    Prose(("item", "\n code", "\n more"), marker="1."),
    Prose(("code",), indent=4),
]


def cut(text: str, cuts: list[int]) -> list[Piece]:
    """The pieces of a text that comes in parts."""
    blocks, places = Blocks(), [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    found = [piece for a, b in pairwise(places) for piece in blocks.feed(text[a:b])]
    return list(joined([*found, *blocks.close()]))


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_pieces_do_not_depend_on_how_the_text_is_cut(cuts: list[int]) -> None:
    assert cut(TEXT, cuts) == PIECES


PARTS = ["a", " b", "\n", "\n\n", "  ", "    ", "\t", "- ", "* ", "1. ", "7) ", "```", "~~~", "# ", "> ", "| ", "|-|"]
PARTS += [
    "---",
    "***",
    "*",
    "**",
    "_",
    "`",
    "``",
    "~~",
    "[x](y)",
    "[",
    "](",
    ")",
    "![",
    "\\",
    "\\*",
    "你好",
    "，",
    "é",
    "<b>",
]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join), st.lists(st.integers(0, 90), max_size=12))
def test_no_text_depends_on_how_it_is_cut(text: str, cuts: list[int]) -> None:
    assert cut(text, cuts) == cut(text, list(range(len(text)))) == cut(text, [])


def test_what_comes_next_begins_anew() -> None:
    blocks = Blocks()
    blocks.feed("- a\n\n```\nb")
    blocks.close()
    assert [*blocks.feed("a\n\n"), *blocks.close()] == [Prose(("a",))]


def test_words_are_given_on_as_they_come() -> None:
    blocks = Blocks()
    assert blocks.feed("One tw") == [Prose(("One",), closes=False)]
    assert blocks.feed("o **bold ") == [Prose((" two",), opens=False, closes=False)]
    assert blocks.feed("words** 你好") == [Prose((" **bold words**", " 你"), opens=False, closes=False)]
    assert blocks.close() == [Prose(("好",), opens=False)]


def test_code_is_given_on_word_by_word() -> None:
    blocks = Blocks()
    assert blocks.feed("```py\na = 'b") == [Code("a =", "py", 0, opens=True)]
    assert blocks.feed("c'\n  ``") == [Code(" 'bc'\n", "py", 0)], "it may be the end of the code"
    assert blocks.feed("` x") == []
    assert blocks.feed("\n```\n") == [Code("  ``` x\n", "py", 0, closes=True)]


def test_quotes_are_given_on_word_by_word() -> None:
    blocks = Blocks()
    assert blocks.feed("> One tw") == [Prose(("One",), closes=False, quotes=1)]
    assert blocks.feed("o\n>\n> - three") == [
        Prose((" two",), opens=False, quotes=1),
    ]
    assert blocks.feed(" four\n") == [Prose(("three", " four"), closes=False, marker="-", quotes=1)]


def test_a_table_is_given_on_once_its_columns_are_settled() -> None:
    blocks = Blocks()
    assert blocks.feed("|a|\n|-|\n" + "|x|\n" * 10) == []
    assert blocks.rows == 11
    (table,) = blocks.feed("|y|\n")
    assert isinstance(table, Table)
    assert (len(table.rows), table.opens, table.closes) == (12, True, False)
    assert blocks.feed("|z|more|\n|\n") == [
        Table((("z | more",),), ("left",), opens=False, closes=False),
        Table((("",),), ("left",), opens=False, closes=False),
    ]
    assert blocks.feed("end\n") == [Table((), ("left",), opens=False), Prose(("end",), closes=False)][:1]


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
LINES += ["\ta", "> a", "|a|", "|-|", "| a | a |", "**a", "a**", "[a](", "`a"]


@given(st.lists(st.sampled_from(LINES), max_size=20).map("\n".join))
def test_no_word_is_lost(text: str) -> None:
    assert "".join(map(_text, cut(text, []))).count("a") == text.count("a")


def _text(piece: Piece) -> str:
    if isinstance(piece, Prose):
        return "".join(piece.parts)
    if isinstance(piece, Code):
        return piece.language * piece.opens + piece.text
    return "".join(map("".join, piece.rows)) if isinstance(piece, Table) else ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("**重点：**内容 and *（注）*后", "重点：内容 and （注）后"),
        ("a * b * c, 2**3, snake_case_name, __init__(self)", "a * b * c, 2**3, snake_case_name, init(self)"),
        ("`code` ``a ` b`` `open", "code a ` b `open"),
        ("[text](http://x.y) ![img](a.png) <http://x.y>", "text (http://x.y) img (a.png) http://x.y"),
        (r"\( x_1 \) \[ y \] \* \\ &lt; a\b", r"\( x_1 \) \[ y \] * \ < a\b"),
        ("[1] [x]: y [ ] (z)", "[1] [x]: y [ ] (z)"),
        ("***both*** ~~gone~~ **a *b* c**", "both gone a b c"),
        ("<b>&#x202e;</b>", "<b><U+202E></b>"),
    ],
)
def test_marks_within_a_line(text: str, shown: str) -> None:
    parts, rest = chunks(text)
    assert "".join(inline(part).plain for part in [*parts, rest]) == shown


@pytest.mark.parametrize("mark", ["**", "`", "[", "~~", "![x]("])
def test_a_mark_that_is_never_closed_is_text_in_the_end(mark: str) -> None:
    text = f"a {mark}b " + "word " * REACH
    parts, rest = chunks(text)
    assert "".join(parts) + rest == text
    assert len(rest) < 10
    assert inline(parts[1]).plain == f" {mark}b"
    parts, rest = chunks(f"a {mark}b word word")
    assert parts == ["a"], "it may be closed"


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
