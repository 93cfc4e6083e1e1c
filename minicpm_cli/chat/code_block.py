"""The code that an answer ends with, for whoever wants nothing but that."""

from __future__ import annotations

from minicpm_cli.chat.pieces import Fence


def last_code_block(text: str) -> str | None:
    """The body of the last fenced code block, without its fences; an unclosed one counts, since answers get cut."""
    fence: Fence | None = None
    body: list[str] | None = None
    for line in text.split("\n"):
        if fence is None:
            fence = Fence.opened_by(line)
            body = [] if fence else body
        elif fence.closed_by(line):
            fence = None
        elif body is not None:
            body.append(fence.body(line))
    return None if body is None else "\n".join(body)
