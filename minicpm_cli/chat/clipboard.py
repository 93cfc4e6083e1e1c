"""Text to the clipboard of the user's terminal by OSC 52, also through ssh: no program is needed on either side."""

from __future__ import annotations

import base64

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.errors import UsageError

_MOST_BYTES = 74_994  # 100,000 bytes of sequence, what xterm and others take


def copy(terminal: Terminal, text: str) -> int:
    """Returns the number of bytes. Raises UsageError where there is no terminal, or too much text."""
    data = text.encode("utf-8", "replace")
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{len(data):,} bytes are more than terminals take ({_MOST_BYTES:,}): /copy FILE")
    stream = terminal.err if terminal.err_tty else terminal.out
    if not stream.isatty():
        raise UsageError("there is no terminal whose clipboard could be set: /copy FILE")
    stream.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")
    stream.flush()
    return len(data)
