"""Read a line, do it, again: questions go to the model, lines that begin with / are commands."""

from __future__ import annotations

from minicpm_cli.chat import commands
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.commands import Leave
from minicpm_cli.chat.lines import Lines
from minicpm_cli.errors import ContextOverflow, MinicpmError


def run(chat: Chat, lines: Lines) -> int:
    """The exit code of the conversation: 0, or 130 after Ctrl-C twice at an empty prompt.

    Where lines come from a pipe, the first error ends it: nobody is there to mend what was wrong.
    """
    pressed = False  # Ctrl-C, and nothing since
    while True:
        try:
            line = lines.read()
            pressed = False
            _do(chat, line)
            if chat.stopped and not lines.typed:
                return 130
        except KeyboardInterrupt:
            if pressed or not lines.typed:
                return 130
            pressed = True
            chat.terminal.line("(Ctrl-C again, Ctrl-D or /exit leaves)")
        except EOFError:
            return 0
        except Leave as leave:
            return leave.code
        except MinicpmError as error:
            if not lines.typed:
                raise
            chat.terminal.line(f"minicpm: {error}{_advice(error)}")


def _do(chat: Chat, line: str) -> None:
    text = line.strip()
    if text.startswith("//"):
        chat.say(text[1:])
    elif text.startswith("/"):
        commands.run(chat, text)
    elif text or chat.attached:
        chat.say(line)


def _advice(error: MinicpmError) -> str:
    if not isinstance(error, ContextOverflow):
        return ""
    return " Here: /undo N takes back what came last, /reset starts over; --overflow drop-oldest lets old messages go."
