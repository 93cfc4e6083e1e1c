"""`minicpm serve`: a model for programs, over HTTP."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from minicpm_cli.cli.options import API_KEY, LOAD, LOOKUP, MODEL, OUTPUT, SAMPLING, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import Interrupted
from minicpm_cli.settings import Settings

if TYPE_CHECKING:
    import socket

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
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeatable.", metavar="NAME")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.", min=1)] = 1024,
    max_body: Annotated[int, typer.Option(help="Largest request, in MiB.", metavar="MIB", min=1)] = 16,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for requests to finish after SIGTERM.", metavar="SECONDS", min=0)
    ] = 300,
    flags: Flags,
) -> int:
    """Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /metrics.

    The sampling options hold for requests that do not say otherwise. Ctrl-C and SIGTERM let running requests finish.
    """
    from minicpm_cli.server.app import Limits, Service
    from minicpm_cli.server.serving import bind

    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    settings = replace(settings, options=replace(settings.options, server=None))  # it is one, whom others ask
    api_key = settings.options.api_key
    with closing(bind(host, port)) as sock:
        if api_key is None and not host.startswith(_LOOPBACK):
            invocation.terminal.note(f"anybody who reaches {host} can ask this server; --api-key KEY asks for a key")
        with invocation.model(settings) as llm:
            service = Service(
                cast("Served", llm),
                served_model_name or _names(llm, settings),
                llm.defaults.checked(settings.sampling),
                Limits(max_body * _MIB, max_queue, drain_timeout),
                api_key,
            )
            return _serve(invocation, service, sock)


def _names(llm: LanguageModel, settings: Settings) -> list[str]:
    """The model's own, and the one by which the user asked for it."""
    return list(dict.fromkeys((llm.info.name, settings.options.model)))


def _serve(invocation: Invocation, service: Service, sock: socket.socket) -> int:
    from minicpm_cli.server.serving import Serving, log_to_stderr

    terminal = invocation.terminal
    if terminal.verbose:
        log_to_stderr()
    serving = Serving(service, terminal.note, log=terminal.verbose)
    serving.go(sock)
    if serving.cut:
        raise Interrupted("stopped; requests that still ran were cut off")
    terminal.note("stopped; every request that was taken is answered")
    return 0
