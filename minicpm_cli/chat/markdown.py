"""Where a markdown text that is still being written can be cut: after every block that can no longer change."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")


@dataclass(slots=True)
class Fence:
    """Whether the lines seen so far are inside a fenced code block."""

    mark: str = ""  # of the fence that is open

    def feed(self, line: str) -> bool:
        """Whether this line opens or closes a fence."""
        match = _FENCE.match(line)
        if not self.mark:
            self.mark = match[1] if match else ""
            return match is not None
        if match is None or not match[1].startswith(self.mark) or line.strip() != match[1]:
            return False
        self.mark = ""
        return True


@dataclass(slots=True)
class Blocks:
    """Feed pieces of text, get finished blocks; `rest` is the one that is still open.

    A block ends at a blank line outside a code fence, or with its fence.
    """

    rest: str = ""
    _fence: Fence = field(default_factory=Fence)
    _scanned: int = 0  # characters of `rest` whose lines are done

    def feed(self, text: str) -> list[str]:
        self.rest += text
        finished: list[str] = []
        while (end := self.rest.find("\n", self._scanned)) >= 0:
            line = self.rest[self._scanned : end]
            self._scanned = end + 1
            if self._ends_with(line):
                finished.append(self.rest[: self._scanned])
                self.rest, self._scanned = self.rest[self._scanned :], 0
        return [block for block in finished if block.strip()]

    def close(self) -> str:
        """The last block."""
        rest, self.rest, self._scanned, self._fence = self.rest, "", 0, Fence()
        return rest

    def _ends_with(self, line: str) -> bool:
        if self._fence.feed(line):
            return not self._fence.mark
        return not self._fence.mark and not line.strip()


def last_code_block(text: str) -> str | None:
    """The body of the last fenced code block, without its fences; an unclosed one counts, since answers get cut."""
    fence, blocks = Fence(), list[list[str]]()
    for line in text.split("\n"):
        edge = fence.feed(line)
        if edge and fence.mark:
            blocks.append([])
        elif fence.mark:
            blocks[-1].append(line)
    return "\n".join(blocks[-1]) if blocks else None
