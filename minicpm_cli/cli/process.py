"""Runs a command line: whatever comes of it becomes at most one message and an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any, NoReturn, cast

import typer

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import completion
from minicpm_cli.cli.assignments import as_two_words
from minicpm_cli.cli.program import program
from minicpm_cli.cli.runtime import Invocation, Runtime
from minicpm_cli.errors import FileError, Interrupted, MinicpmError
from minicpm_cli.settings import variables

# ClickException, which typer brings along but does not name
_CLICK_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
_SIGPIPE_CODE = 128 + 13
_UNWRITABLE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EIO)
_NO_COMMAND = re.compile(r"No such command '(.*?)'\.?(?: Did you mean .*)?", re.DOTALL)
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("list", "ls"), " (minicpm models lists them)"),
        **dict.fromkeys(("show", "info"), " (minicpm plan MODEL tells of one)"),
        **dict.fromkeys(("generate", "ask", "prompt"), ' (minicpm run "PROMPT" asks a model)'),
        **dict.fromkeys(("rm", "remove", "delete"), " (minicpm models --json tells where one lies)"),
    }
)

app = program()


def exit_code(argv: Sequence[str], runtime: Runtime) -> int:
    """The exit code of a command line. Ends the process itself only when the reader of its output has gone."""
    invocation = Invocation(runtime)
    try:
        code = _invoke(list(argv) or ["--help"], invocation)
        invocation.terminal.out.flush()
        return code
    except BrokenPipeError:
        _end_as_by_sigpipe()
    except KeyboardInterrupt:
        return _fail(invocation, "interrupted", Interrupted.exit_code)
    except MinicpmError as error:
        return _fail(invocation, str(error), error.exit_code)
    except _CLICK_ERROR as error:
        return _fail(invocation, _usage(error), 2)
    except Exception as error:  # noqa: BLE001 -- a defect of ours; the user gets one line, not a traceback
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            return _fail(invocation, f"cannot write the output: {error.strerror}", FileError.exit_code)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "" if invocation.verbose(argv) else " (-v shows where; please report it)"
        return _fail(invocation, f"internal error: {what}{hint}", 3, trace=invocation.verbose(argv))


def _invoke(argv: list[str], invocation: Invocation) -> int:
    if argv[0] in (completion.INSTALL, completion.SHOW) and len(argv) <= 2:  # typer's own take no name of a shell
        return _completion(*argv, terminal=invocation.terminal)
    command = typer.main.get_command(app)
    try:
        with as_two_words(variables()):
            result = command.main(args=argv, prog_name="minicpm", standalone_mode=False, obj=invocation)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # click's own answer to a closed pipe
            raise leaving.__context__ from None
        return leaving.code if isinstance(leaving.code, int) else 2
    return result if isinstance(result, int) else 0


def _completion(option: str, shell: str | None = None, *, terminal: Terminal) -> int:
    if option == completion.SHOW:
        terminal.out.write(completion.script(shell) + "\n")
    else:
        terminal.note(completion.install(shell))
    return 0


def _usage(error: BaseException) -> str:
    """Click's message with the command whose --help tells more."""
    ctx = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = message.rstrip(".") + _remedy(error, ctx, message)
    end = "" if message.endswith("?") else "."
    return f"{message}{end} See: {ctx.command_path if ctx else 'minicpm'} --help"


def _remedy(error: BaseException, ctx: Any, message: str) -> str:
    """What people who are used to other programs have perhaps meant."""
    root = ctx is not None and ctx.parent is None
    if type(error).__name__ == "NoSuchOption":
        if root:
            return " before a command: options stand behind it"
        if ctx and ctx.info_name in ("run", "create") and not getattr(error, "possibilities", None):
            return " (a prompt that begins with - needs -- before it)"
    command = _NO_COMMAND.fullmatch(message)
    if root and command:
        return ' (minicpm run "PROMPT" asks a model)' if " " in command[1] else _ELSEWHERE.get(command[1], "")
    return ""


def _fail(invocation: Invocation, message: str, code: int, *, trace: bool = False) -> int:
    try:
        with suppress(OSError) if code == FileError.exit_code else nullcontext():  # what cannot be written
            invocation.terminal.out.flush()
        if trace:
            traceback.print_exc(file=invocation.terminal.err)
        invocation.terminal.line(f"minicpm: {message}")
    except BrokenPipeError:
        _end_as_by_sigpipe()
    except OSError:  # stderr takes nothing: there is nowhere left to say it
        return code
    return code


def _end_as_by_sigpipe() -> NoReturn:
    """Quietly, as programs without a handler end: nothing more can be written, not even by the interpreter's exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            os.dup2(nowhere, stream.fileno())
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(_SIGPIPE_CODE)
