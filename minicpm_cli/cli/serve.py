"""`minicpm serve`: a model for programs, over HTTP."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from minicpm_cli.cli.options import API_KEY, LOAD, LOOKUP, MODEL, OUTPUT, SAMPLING, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import Interrupted
from minicpm_cli.settings import Settings

if TYPE_CHECKING:
    import socket

    from minicpm_cli.chat.terminal import Terminal
    from minicpm_cli.llm.info import LanguageModel
    from minicpm_cli.server.app import Service
    from minicpm_cli.server.served import Served

_EXAMPLES = examples(
    "minicpm serve -m minicpm4-0.5b",
    "minicpm serve --model-path ./MiniCPM4-8B --chat-template chatml --trust-remote-code",
    "minicpm serve -m minicpm4-8b --host 0.0.0.0 --port 8080 --api-key secret",
    "minicpm serve -m minicpm4-8b --quantize w4 --ctx 8192 --max-seqs 64",
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\",
    """     -d '{"messages": [{"role": "user", "content": "Name a river."}], "stream": true}'""",
)
_LOOPBACK = ("127.", "localhost", "::1")
_MIB = 2**20


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=_EXAMPLES)(serve)


@takes(API_KEY, MODEL, LOAD, LOOKUP, SAMPLING, OUTPUT)
def serve(
    context: typer.Context,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", metavar="N", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeatable.", metavar="NAME")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.", metavar="N", min=1)] = 1024,
    max_body: Annotated[int, typer.Option(help="Largest request, in MiB.", metavar="MIB", min=1)] = 16,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for requests to finish after SIGTERM.", metavar="SECONDS", min=0)
    ] = 300,
    http_process: Annotated[
        bool | None,
        typer.Option(
            help="HTTP in a process of its own, so that writing answers never holds the model up. On a GPU it is.",
            show_default=False,
        ),
    ] = None,
    flags: Flags,
) -> int:
    """Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /metrics.

    The sampling options hold for requests that do not say otherwise. Ctrl-C and SIGTERM let running requests finish.
    """
    from minicpm_cli.server.address import bind
    from minicpm_cli.server.apart import Front, Setup
    from minicpm_cli.server.served import Limits

    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    settings = replace(settings, options=replace(settings.options, server=None))  # it is one, whom others ask
    api_key, terminal = settings.options.api_key, invocation.terminal
    with closing(bind(host, port)) as sock, ExitStack() as stack:
        if api_key is None and not host.startswith(_LOOPBACK):
            terminal.note(f"anybody who reaches {host} can ask this server; --api-key KEY asks for a key")
        front = stack.enter_context(Front(sock)) if _likely_apart(http_process, settings) else None
        llm = cast("Served", stack.enter_context(invocation.model(settings)))
        names = tuple(served_model_name or _names(llm, settings))
        limits = Limits(max_body * _MIB, max_queue, drain_timeout)
        defaults = llm.defaults.checked(settings.sampling)
        if llm.open_texts is None or not _apart(http_process, llm):
            from minicpm_cli.server.app import Service

            return _serve(terminal, Service(llm, names, defaults, limits, api_key), sock)
        setup = Setup(llm.open_texts, llm.info, names, defaults, limits, api_key, log=terminal.verbose)
        front = front or stack.enter_context(Front(sock))
        return _ended(terminal, cut=front.serve(llm, setup, terminal.note))


def _likely_apart(asked: bool | None, settings: Settings) -> bool:
    """Before the model says where it runs: the process then starts while the model is loaded."""
    from minicpm_cli.llm.warm import has_driver

    return settings.options.device != "cpu" and has_driver() if asked is None else asked


def _apart(asked: bool | None, llm: Served) -> bool:
    return llm.info.device != "cpu" if asked is None else asked


def _names(llm: LanguageModel, settings: Settings) -> list[str]:
    """The model's own, and the one by which the user asked for it."""
    return list(dict.fromkeys((llm.info.name, settings.options.model)))


def _serve(terminal: Terminal, service: Service, sock: socket.socket) -> int:
    from minicpm_cli.server.serving import Serving, log_to_stderr

    if terminal.verbose:
        log_to_stderr()
    serving = Serving(service, terminal.note, log=terminal.verbose)
    serving.go(sock)
    return _ended(terminal, cut=serving.cut)


def _ended(terminal: Terminal, *, cut: bool) -> int:
    if cut:
        raise Interrupted("stopped; requests that still ran were cut off")
    terminal.note("stopped; every request that was taken is answered")
    return 0
