"""Read a line, do it, again: questions go to the model, lines that begin with / are commands."""

from __future__ import annotations

from minicpm_cli.chat import commands
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.commands import Leave
from minicpm_cli.chat.interrupts import orderly_end
from minicpm_cli.chat.keyboard import unechoed
from minicpm_cli.chat.lines import Lines
from minicpm_cli.errors import ContextOverflow, FileError, MinicpmError


def run(chat: Chat, lines: Lines) -> int:
    """See `_run`. A request to end, or a closed terminal, raises SystemExit."""
    with orderly_end():
        return _run(chat, lines)


def _run(chat: Chat, lines: Lines) -> int:
    """The exit code of the conversation: 0, 130 after Ctrl-C twice at an empty prompt, 3 when a pipe's was not saved.

    Where lines come from a pipe, the first error ends it: nobody is there to mend what was wrong.
    """
    pressed = False  # Ctrl-C, and nothing since
    while True:
        try:
            line = _read(chat, lines)
            pressed = False
            with unechoed():
                _do(chat, line)
            if chat.stopped and not lines.typed:
                return 130
        except KeyboardInterrupt:
            if pressed or not lines.typed:
                return 130
            pressed = True
            chat.terminal.line("(Ctrl-C again, Ctrl-D or /exit leaves)")
        except EOFError:
            return _end(chat, lines)
        except Leave as leave:
            return leave.code or _end(chat, lines)
        except MinicpmError as error:
            if not lines.typed:
                raise
            chat.terminal.line(f"minicpm: {error}{_advice(error)}")


def _read(chat: Chat, lines: Lines) -> str:
    draft, chat.draft = chat.draft, ""
    return lines.read(draft)


def _end(chat: Chat, lines: Lines) -> int:
    return FileError.exit_code if chat.conversation.behind and not lines.typed else 0


def _do(chat: Chat, line: str) -> None:
    text = line.strip()
    if text.startswith("//"):
        chat.say(text[1:])
    elif commands.is_command(text):
        commands.run(chat, text)
    elif text or chat.attached:
        chat.say(line)


def _advice(error: MinicpmError) -> str:
    if not isinstance(error, ContextOverflow):
        return ""
    return (
        " Nothing was sent. /undo N takes back what came last, /reset starts over, /set overflow drop-oldest lets old "
        "messages go, /file - sends no files; Up brings the question back."
    )
