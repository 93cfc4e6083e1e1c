"""`minicpm run`: one question, one answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.chat.made import Made, Source, settings_of
from minicpm_cli.chat.reply import Reply
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.cli import completion, reading
from minicpm_cli.cli.adapter import refuse_another_adapter
from minicpm_cli.cli.answering import Form, answer, finish
from minicpm_cli.cli.options import LOAD, LOGPROBS, LOOKUP, MODEL, OUTPUT, SAMPLING, SERVER, Flags, examples, takes
from minicpm_cli.cli.prompt_template import PromptTemplate
from minicpm_cli.cli.runtime import Invocation, stdin_bytes
from minicpm_cli.cli.template_files import TemplateFolder
from minicpm_cli.cli.tools import read_tools
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.settings import DEFAULT, Layer, Settings
from minicpm_cli.settings_table import PROFILE
from minicpm_cli.types import Message, Request, SamplingParams

_PATIENCE = 0.3  # seconds for another run to write its few lines
SESSION = "run"  # a run that is not continued begins this session anew
_EXAMPLES = examples(
    'minicpm run "How many days are in a week?"',
    'git diff | minicpm run "Write a commit message"',
    'minicpm run -f notes.txt -s "Answer in French." "Summarize this."',
    'minicpm run -x "A shell one-liner that counts files" > count.sh',
    'minicpm run -c "And in a leap year?"',
    'minicpm run --json -t 0 -n 50 "Name three rivers" | jq .usage',
    "minicpm run --template review file=main.py",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked, and how."""

    question: str
    system: str | None = None
    prefill: str = ""
    form: Form = field(default_factory=Form)


@dataclass(frozen=True, slots=True)
class Before:
    """What was said before, in the session `name`; `layer` holds the model that it was said to, `usual` the user's."""

    name: str = SESSION
    turns: Sequence[Turn] = ()
    layer: Layer | None = None
    usual: str = ""


def register(app: typer.Typer) -> None:
    app.command("run", epilog=_EXAMPLES)(run)


@takes(MODEL, SERVER, LOAD, LOOKUP, SAMPLING, LOGPROBS, OUTPUT)
def run(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="The question; piped stdin is added to it. With --template: also NAME=VALUE.",
            autocompletion=completion.variables,
        ),
    ] = None,
    *,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System prompt.", metavar="TEXT")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("-f", "--file", help="Text file to add; repeatable; -: stdin.", metavar="FILE")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="A prompt template: its name, or its file.", metavar="NAME", autocompletion=completion.templates
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            help="Of stdin and files; UTF-8 unless given.", metavar="NAME", autocompletion=completion.encodings
        ),
    ] = None,
    prefill: Annotated[str, typer.Option(help="How the answer begins.", metavar="TEXT", show_default=False)] = "",
    extract: Annotated[bool, typer.Option("-x", "--extract", help="Only the last fenced code block.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
    tools: Annotated[
        Path | None, typer.Option(help="What the model may call: a JSON file of OpenAI's tools.", metavar="FILE")
    ] = None,
    tool_choice: Annotated[
        str | None, typer.Option(help="auto, none, required, or the tool that must be called.", metavar="NAME")
    ] = None,
    show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Show the prompt's tokens; no answer.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    go_on: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    flags: Flags,
) -> int:
    """Answer one question. The answer goes to stdout, everything else to stderr."""
    invocation: Invocation = context.obj
    form = Form(extract, as_json)
    _check(form, flags)
    offered, choice = read_tools(tools, tool_choice)
    if offered and not (as_json or show_prompt):
        raise UsageError("calls of --tools have their place in the record of --json; add --json")
    code = reading.known_encoding(encoding)
    found = TemplateFolder.of_user().find(template) if template is not None else None
    before = _before(flags) if go_on else Before()
    settings = _one_seat(invocation.configure(flags, before.layer, found.layer if found else None))
    refuse_another_adapter(before.turns, settings)
    _say_model(invocation, settings, before)
    source = reading.Source(invocation.terminal, stdin_bytes(), code)
    asked = _with_flags(_asked(source, prompt or [], file or [], found), system, prefill, form)
    if raw and (asked.system is not None or go_on):
        raise UsageError("--raw sends the prompt without a template, so --system and --continue have no place in it")
    talk = _talk(before, asked)
    messages = asked.question if raw else (*talk.messages, Message("user", asked.question))
    request = Request(f"run-{secrets.token_hex(6)}", messages, SamplingParams(), asked.prefill)
    request = replace(request, tools=offered, tool_choice=choice)
    if show_prompt:
        return _show_prompt(invocation, settings, request, as_json=as_json)
    with invocation.model(settings) as llm:
        request = replace(request, params=llm.defaults.checked(settings.sampling))
        reply = answer(llm, request, invocation.terminal, asked.form)
        made = _made(llm, settings, request, reply)
    if not raw and not reply.tool_calls:
        _store(invocation, settings, talk, before, asked.question, Turn(reply.message, made=made))
    return finish(reply, invocation.terminal, asked.form)


def _check(form: Form, flags: Flags) -> None:
    if form.extract and form.json:
        raise UsageError("--extract and --json are two forms of the answer; choose one")
    if flags["logprobs"] is not None and not form.json:
        raise UsageError("--logprobs has its place in the record of --json; add --json")


def _asked(source: reading.Source, words: list[str], files: list[Path], found: PromptTemplate | None) -> Asked:
    for word in reading.stray_files(words, files):
        source.terminal.note(f"{word} is taken for words of the prompt; each file needs its own -f")
    if model := reading.stray_model(words):
        source.terminal.note(f"{model} is taken for a word of the prompt; -m {model} chooses the model")
    if found is None:
        return Asked(source.question(words, files))
    system, question = source.filled(found, words, files)
    return Asked(question, system, found.prefill, Form(extract=found.extract))


def _with_flags(asked: Asked, system: str | None, prefill: str, form: Form) -> Asked:
    """What flags say is stronger than what a template says."""
    form = Form(form.extract or (asked.form.extract and not form.json), form.json)
    return replace(
        asked, system=asked.system if system is None else system, prefill=prefill or asked.prefill, form=form
    )


def _before(flags: Flags) -> Before:
    """The last conversation, and the model that it was held with."""
    settings = Settings.load({PROFILE: flags[PROFILE]})
    sessions = _sessions(settings)
    name = sessions.latest()
    turns = sessions.open(name).turns
    made = next((turn.made for turn in reversed(turns) if turn.made), None)
    kept = {key: value for key, value in made.source.load.items() if key == "lora"} if made else {}
    layer = Layer(f"session {name}", {**kept, "model": made.source.model}) if made else None
    return Before(name, turns, layer, settings.options.model)


def _one_seat(settings: Settings) -> Settings:
    """One request has one place: the demo's cache is 0.19 GB instead of 0.76, and its first token comes after 1.50 s
    instead of 1.58 on 2 cores."""
    if settings.origin("max_seqs") != DEFAULT:
        return settings
    return replace(settings, options=replace(settings.options, max_seqs=1))


def _say_model(invocation: Invocation, settings: Settings, before: Before) -> None:
    """Only where the user's own choice would be another one."""
    chosen = settings.options.model
    if before.layer and settings.origin("model") == before.layer.origin and chosen != before.usual:
        invocation.terminal.note(f"going on with the model of this conversation: {chosen} (-m takes another)")


def _talk(before: Before, asked: Asked) -> Conversation:
    """What was said before. Nothing is written until there is an answer."""
    talk = Conversation(list(before.turns))
    if asked.system is not None:
        talk.set_system(asked.system)
    return talk


def _sessions(settings: Settings) -> Sessions:
    return Sessions(settings.data_dir / "sessions")


def _made(llm: LanguageModel, settings: Settings, request: Request, reply: Reply) -> Made:
    """How the answer came about, for whoever goes on with it or wants it again."""
    lora = settings.options.lora if llm.info.adapter else None
    source = Source.of(llm.info, settings.options.model, {"lora": str(Path(lora).resolve())} if lora else None)
    given = len(request.prefill)
    return Made(source, settings_of(request.params), reply.seed, reply.finish, reply.usage, given=given)


def _store(
    invocation: Invocation, settings: Settings, talk: Conversation, before: Before, question: str, reply: Turn
) -> None:
    """For --continue. Where nothing can be kept, the answer was given all the same."""
    turns, sessions = [Turn(Message("user", question)), reply], _sessions(settings)
    try:
        with _writable(invocation, sessions, before) as name:
            transcript = sessions.transcript(name)
            if name == before.name and before.turns and talk.turns == before.turns:
                for turn in turns:  # another program may have added to it meanwhile
                    transcript.append(turn)
            else:
                transcript.rewrite([*talk.turns, *turns])
    except FileError as error:
        invocation.terminal.note(f"{error} This conversation cannot be continued.")


@contextmanager
def _writable(invocation: Invocation, sessions: Sessions, before: Before) -> Iterator[str]:
    """The session to write to: another one where the usual one is open in a chat, which has its own idea of it."""
    names = iter(dict.fromkeys((before.name, SESSION, *(f"{SESSION}-{n}" for n in range(2, 10)))))
    claim, patience = None, _PATIENCE
    while claim is None:
        name = next(names, None) or sessions.fresh()
        with suppress(UsageError):
            claim = sessions.claim(name, patience)
        patience = 0.0
    if before.turns and name != before.name:
        invocation.terminal.note(f"{before.name} is open in a chat, so the conversation goes on as {name}")
    with claim:
        yield name


def _show_prompt(invocation: Invocation, settings: Settings, request: Request, *, as_json: bool) -> int:
    """A line for each token, or a record with the names that /tokenize has for them."""
    prompts = invocation.runtime.open_prompts(settings, invocation.terminal)
    params = SamplingParams().checked(settings.sampling)
    pieces = list(prompts.pieces(prompts.prompt(replace(request, params=params))))
    if as_json:
        tokens, texts = [ident for ident, _ in pieces], [text for _, text in pieces]
        lines = [json.dumps({"count": len(pieces), "tokens": tokens, "token_strs": texts}, ensure_ascii=False)]
    else:
        lines = [f"{ident}\t{json.dumps(text, ensure_ascii=False)}" for ident, text in pieces]
    invocation.terminal.out.write("".join(f"{line}\n" for line in lines))
    return 0
