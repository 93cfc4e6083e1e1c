"""What is shown again of a reply that the model goes on with."""

from __future__ import annotations

import pytest

from minicpm_cli.chat.open_end import open_end


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", ""),
        ("one", "one"),
        ("one\n\ntwo\nthree", "two\nthree"),
        ("one\n\n", ""),
        ("- a\n- b", "- a\n- b"),
        ("one\n\n```py\nx = 1\n\ny", "```py\nx = 1\n\ny"),
        ("one\n```py\nx = 1\n```\ntwo", "two"),
        ("```\na\n```\n", ""),
        ("```\na\n\n```b", "```\na\n\n```b"),
        ("one\n\n~~~~\n~~~\n\nx", "~~~~\n~~~\n\nx"),
    ],
)
def test_the_last_paragraph_or_open_code(text: str, end: str) -> None:
    assert open_end(text) == end
