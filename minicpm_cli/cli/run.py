"""`minicpm run`: one question, one answer."""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from minicpm_cli.chat.attach import decode, quoted, read_text, without_final_newline
from minicpm_cli.chat.conversation import Conversation
from minicpm_cli.chat.markdown import last_code_block
from minicpm_cli.chat.reply import Reply
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.view import PlainView
from minicpm_cli.cli.options import LOAD, LOGPROBS, LOOKUP, MODEL, OUTPUT, SAMPLING, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation, stdin_bytes
from minicpm_cli.errors import UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.settings import Settings
from minicpm_cli.types import Message, Request, SamplingParams

SESSION = "run"  # a run that is not continued begins this session anew
_EXAMPLES = examples(
    'minicpm run "How many days are in a week?"',
    'git diff | minicpm run "Write a commit message"',
    'minicpm run -f notes.txt -s "Answer in French." "Summarize this."',
    'minicpm run -x "A shell one-liner that counts files" > count.sh',
    'minicpm run -c "And in a leap year?"',
    'minicpm run --json -t 0 -n 50 "Name three rivers" | jq .usage',
)


@dataclass(frozen=True, slots=True)
class Form:
    """In which form the answer comes out."""

    extract: bool = False
    json: bool = False


def register(app: typer.Typer) -> None:
    app.command("run", epilog=_EXAMPLES)(run)


@takes(MODEL, LOAD, LOOKUP, SAMPLING, LOGPROBS, OUTPUT)
def run(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="The question; piped stdin is added to it.")
    ] = None,
    *,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System prompt.", metavar="TEXT")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("-f", "--file", help="Text file to add; repeatable.", metavar="FILE")
    ] = None,
    prefill: Annotated[str, typer.Option(help="How the answer begins.", metavar="TEXT", show_default=False)] = "",
    extract: Annotated[bool, typer.Option("-x", "--extract", help="Only the last fenced code block.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
    show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Show the prompt's tokens; no answer.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    go_on: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    flags: Flags,
) -> int:
    """Answer one question. The answer goes to stdout, everything else to stderr."""
    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    _check(raw=raw, system=system, go_on=go_on, extract=extract, as_json=as_json)
    question = _question(prompt or [], file or [])
    talk = _talk(settings, go_on=go_on)
    if system is not None:
        talk.set_system(system)
    messages = question if raw else (*talk.messages, Message("user", question))
    request = Request(f"run-{secrets.token_hex(6)}", messages, SamplingParams(), prefill)
    if show_prompt:
        return _show_prompt(invocation, settings, request)
    with invocation.model(settings) as llm:
        request = replace(request, params=llm.defaults.checked(settings.sampling))
        reply = _answer(llm, request, invocation.terminal, Form(extract, as_json))
    if not raw:
        _store(settings, talk, question, reply, go_on=go_on)
    return _finish(reply, invocation.terminal, extract=extract)


def _check(*, raw: bool, system: str | None, go_on: bool, extract: bool, as_json: bool) -> None:
    if raw and (system is not None or go_on):
        raise UsageError("--raw sends the prompt without a template, so --system and --continue have no place in it")
    if extract and as_json:
        raise UsageError("--extract and --json are two forms of the answer; choose one")


def _question(prompt: list[str], files: list[Path]) -> str:
    """Files, then the arguments, then stdin, with blank lines between."""
    pipe = stdin_bytes()
    piped = without_final_newline(decode(pipe.read(), "stdin")) if pipe else ""
    parts = [*(quoted(path.name, read_text(path)) for path in files), " ".join(prompt), piped]
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise UsageError('there is no prompt: minicpm run "How many days are in a week?", or pipe one in')
    return text


def _talk(settings: Settings, *, go_on: bool) -> Conversation:
    """What was said before. Nothing is written until there is an answer."""
    if not go_on:
        return Conversation()
    sessions = _sessions(settings)
    return Conversation(sessions.open(sessions.latest()).turns)


def _sessions(settings: Settings) -> Sessions:
    return Sessions(settings.data_dir / "sessions")


def _store(settings: Settings, talk: Conversation, question: str, reply: Reply, *, go_on: bool) -> None:
    sessions = _sessions(settings)
    name = sessions.latest() if go_on else SESSION
    talk.add(Message("user", question))
    talk.add(reply.message)
    sessions.transcript(name).rewrite(talk.turns)


def _show_prompt(invocation: Invocation, settings: Settings, request: Request) -> int:
    prompts = invocation.runtime.open_prompts(settings, invocation.terminal)
    params = SamplingParams().checked(settings.sampling)
    for ident, piece in prompts.pieces(prompts.prompt(replace(request, params=params))):
        invocation.terminal.out.write(f"{ident}\t{json.dumps(piece, ensure_ascii=False)}\n")
    return 0


def _answer(llm: LanguageModel, request: Request, terminal: Terminal, form: Form) -> Reply:
    """Streams the answer, or prints the one piece that was asked for once it is there."""
    reply, view, streamed = Reply(request.prefill), PlainView(terminal), not (form.extract or form.json)
    if streamed:
        view.show("answer", request.prefill)
    try:
        with closing(llm.stream([request])) as events:
            for event in reply.follow(events):
                if streamed or (event.channel == "think" and not form.json):
                    view.show(event.channel, event.text)
    finally:
        view.end()
    if form.json:
        terminal.answer(json.dumps(record(llm, request, reply), ensure_ascii=False) + "\n")
    elif form.extract and (block := last_code_block(reply.text)) is not None:
        terminal.answer(f"{block}\n")
    return reply


def record(llm: LanguageModel, request: Request, reply: Reply) -> dict[str, Any]:
    """The record of --json."""
    usage, timings = reply.usage, reply.timings
    assert usage is not None, "a reply that ended has both"
    assert timings is not None
    logprobs = [{"token": t.token, "logprob": t.logprob, "top": t.top} for t in reply.logprobs]
    return {
        "id": request.id,
        "model": llm.info.name,
        "text": reply.text,
        "think": reply.thought,
        "finish_reason": reply.finish,
        "seed": reply.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "load_seconds": round(llm.info.load_seconds, 4),
            "first_token_seconds": round(timings.first_token_seconds, 4),
            "prefill_tokens_per_second": round(timings.prefill_rate(usage), 2),
            "decode_tokens_per_second": round(timings.decode_rate(usage), 2),
        },
    } | ({"logprobs": logprobs} if logprobs else {})


def _finish(reply: Reply, terminal: Terminal, *, extract: bool) -> int:
    if reply.cut:
        count = reply.usage.completion_tokens if reply.usage else 0
        where = "while the model was still thinking " if reply.thought and not reply.text else ""
        terminal.note(f"the answer was cut {where}at {count} tokens; -n N allows more, as far as --ctx does")
    terminal.detail(reply.summary())
    if extract and last_code_block(reply.text) is None:
        terminal.line("minicpm: there is no fenced code block in the answer:")
        terminal.line(reply.text)
        return 1
    return 0
