"""Where a growing markdown text is cut into finished blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpm_cli.chat.markdown import Blocks, last_code_block

TEXT = "# Title\n\nA para\ngraph.\n\n```py\na\n\nb\n```\nafter\n\n~~~~\n~~~\n```\n~~~~\n- x\n\n1. y"
BLOCKS = ["# Title\n\n", "A para\ngraph.\n\n", "```py\na\n\nb\n```\n", "after\n\n", "~~~~\n~~~\n```\n~~~~\n", "- x\n\n"]


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_blocks_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    blocks = Blocks()
    found = [block for a, b in pairwise(places) for block in blocks.feed(TEXT[a:b])]
    assert found == BLOCKS
    assert blocks.close() == "1. y"


@given(st.text(alphabet="a`~ \n#", max_size=60))
def test_no_text_but_blank_lines_is_lost(text: str) -> None:
    blocks = Blocks()
    found = "".join([*blocks.feed(text), blocks.close()])
    assert found.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


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
    ],
)
def test_last_code_block(text: str, block: str | None) -> None:
    assert last_code_block(text) == block
