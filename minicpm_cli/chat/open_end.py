"""How a reply ends that the model goes on with: shown again, so that what is added to it looks right."""

from __future__ import annotations

from minicpm_cli.chat.pieces import Fence


def open_end(text: str) -> str:
    """The last paragraph, or the code block that is still open."""
    lines, start = text.splitlines(keepends=True), 0
    fence: Fence | None = None
    for number, line in enumerate(lines):
        if fence is None:
            fence = Fence.opened_by(line.rstrip("\n"))
            start = number if fence else number + 1 if not line.strip() else start
        elif fence.closed_by(line.rstrip("\n")):
            fence, start = None, number + 1
    return "".join(lines[start:])
