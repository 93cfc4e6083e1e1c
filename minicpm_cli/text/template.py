"""Messages to a prompt, by the checkpoint's own chat template, such that a message cannot write control tokens.

Before rendering, a mark (a character that no message contains) goes behind every character of a message that could
begin a control token. What matches a control token in the rendered text is then the template's own. The marks are taken
out before the text is encoded as a whole, so an ordinary prompt gets exactly the ids that transformers gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minicpm_cli.errors import RequestError, TemplateError
from minicpm_cli.text.chatml import CHATML
from minicpm_cli.text.detok import THINK_TAGS, ThinkTags
from minicpm_cli.text.marks import Marks, unmarked
from minicpm_cli.text.sandbox import Sandbox
from minicpm_cli.text.template_files import find_template
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.text.tool_formats import ToolFormat, format_of
from minicpm_cli.text.tool_prompt import (
    calls_for_template,
    probe_call,
    probe_tool,
    shows_python,
    texts_of,
    texts_of_calls,
    tool_for_template,
)
from minicpm_cli.types import ROLES, Channel, Message, Tool

BUILT_IN = {
    "chatml": CHATML,
    "minicpm": (
        "{% for message in messages %}{% if message['role'] == 'user' %}<用户>{{ message['content'].strip() }}<AI>"
        "{% else %}{{ message['content'].strip() }}{% endif %}{% endfor %}"
    ),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text; `mark` breaks whatever in a message could pass for a control token."""

    text: str
    mark: str

    @property
    def plain(self) -> str:
        return unmarked(self.text, self.mark)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to generate from, and the channel that the first generated token belongs to."""

    ids: list[int]
    channel: Channel


class ChatTemplate:
    """A compiled template with the tokens that it may use. Rendering is safe from any thread."""

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = "chat template") -> None:
        self.source, self.origin = source, origin
        # The think tags tell the channel of the answer, be they control tokens or not.
        self._marks = Marks([*tokenizer.control_text, *(tag for pair in THINK_TAGS for tag in pair)])
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._sandbox = Sandbox(source, origin)

    def render(
        self,
        messages: Sequence[Message],
        *,
        think: bool | None = None,
        prefill: str = "",
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Rendered:
        """The prompt. `prefill` is the beginning of the assistant's answer; `think` None leaves the template's default.

        Raises RequestError(bad_role) for unknown roles and TemplateError when the template fails.
        """
        calls_as_text = self._calls_as_text if any(message.tool_calls for message in messages) else False
        return self._render(messages, tools, think, prefill, add_generation_prompt, calls_as_text=calls_as_text)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes its tool calls; None where the template takes no tools or another form is meant."""
        if "tools" not in self.source:
            return None
        tool = probe_tool()
        try:
            shown = self._render([Message("user", "q")], [tool], None, "", True, calls_as_text=False).plain
        except TemplateError:
            return None
        return format_of(self.source) if tool.name in shown else None

    @cached_property
    def _calls_as_text(self) -> bool:
        """Whether the template takes the arguments of past calls as the text of a JSON object, not as the object."""
        turns = [Message("user", "q"), Message("assistant", "", tool_calls=(probe_call(),))]
        try:
            return shows_python(self._render(turns, [], None, "", True, calls_as_text=False).plain)
        except TemplateError:
            return True

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        think: bool | None,
        prefill: str,
        add_generation_prompt: bool,
        *,
        calls_as_text: bool,
    ) -> Rendered:
        chat = [self._as_template_message(message) for message in messages]
        mark = self._marks.choose([prefill, *_texts(chat, messages, tools)])

        def break_up(text: str) -> str:
            return self._marks.break_up(text, mark)

        def break_word(text: str) -> str:
            return self._marks.break_word(text, mark)

        marked: list[dict[str, Any]] = [
            {key: text if key == "role" else break_up(text) for key, text in turn.items()} for turn in chat
        ]
        for turn, message in zip(marked, messages, strict=True):
            if message.tool_calls:
                turn["tool_calls"] = calls_for_template(message.tool_calls, break_word, as_text=calls_as_text)
        given = [tool_for_template(tool, break_word) for tool in tools] or None
        variables: dict[str, Any] = {**self._tokens, "messages": marked, "tools": given, "documents": None}
        if think is not None:
            variables["enable_thinking"] = think
        text = self._sandbox.render(variables | {"add_generation_prompt": add_generation_prompt})
        return Rendered(text + break_up(prefill), mark)

    def _as_template_message(self, message: Message) -> dict[str, str]:
        turn = _as_template_message(message)
        if "reasoning_content" in turn and "thought" in self.source:
            turn["thought"] = turn["reasoning_content"]  # its name in MiniCPM3's template
        return turn


def load_template(files: Path, choice: str, tokenizer: Tokenizer) -> ChatTemplate:
    """`choice`: "auto" (the checkpoint's own), "chatml", "minicpm" or the path of a template file.

    Raises TemplateError when there is none, or when it cannot be read or compiled.
    """
    if choice in BUILT_IN:
        return ChatTemplate(BUILT_IN[choice], tokenizer, f"built-in template {choice}")
    if choice != "auto":
        return ChatTemplate(_read_file(Path(choice)), tokenizer, choice)
    found = find_template(files)
    if found is None:
        raise TemplateError(
            f"{files}: the model has no chat template. Give one with --chat-template chatml, minicpm or a file, "
            "or send the prompt as it is with --raw."
        )
    return ChatTemplate(found.source, tokenizer, found.origin)


def build_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    think: bool | None = None,
    prefill: str = "",
    add_generation_prompt: bool = True,
    think_tags: ThinkTags = THINK_TAGS,
    tools: Sequence[Tool] = (),
    begun: str = "",
) -> Prompt:
    """The prompt's ids with exactly one BOS, none of them a control token out of a message. Errors: see `render`.

    `begun` is how the answer is made to begin, control tokens and all, after a think block that was left open.
    """
    rendered = template.render(
        messages, think=think, prefill=prefill, add_generation_prompt=add_generation_prompt, tools=tools
    )
    text = rendered.text
    if begun:
        text += _closing(text, think_tags) + begun
    named = tokenizer.named(tokenizer.clean(text))
    ids = _with_bos(tokenizer, tokenizer.encode_named(unmarked(named, rendered.mark)))
    return Prompt(ids, _channel(text + (prefill and "\n" + prefill), think_tags))


def prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Any) -> list[int]:
    """The ids of `build_prompt` alone."""
    return build_prompt(tokenizer, template, messages, **options).ids


def raw_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """A prompt without a template: plain text, behind one BOS where the tokenizer adds it."""
    return Prompt(_with_bos(tokenizer, tokenizer.encode(text, control=False)), "answer")


def show_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[int, str]]:
    """Each id with its text, for people to read."""
    return [(ident, tokenizer.piece_text(ident)) for ident in ids]


def _with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    start = 0
    while ids[start : start + 1] == [bos]:
        start += 1
    return [bos, *ids[start:]] if start or tokenizer.add_bos else ids


def _channel(text: str, tags: ThinkTags) -> Channel:
    """Inside a think block that the template (not a message: those are broken by marks) opened and did not close?"""
    return "think" if any(text.rfind(opening) > text.rfind(closing) for opening, closing in tags) else "answer"


def _closing(text: str, tags: ThinkTags) -> str:
    """What ends the think block that the template opened."""
    return next((f"\n{closing}\n\n" for opening, closing in tags if text.rfind(opening) > text.rfind(closing)), "")


def _texts(chat: Sequence[dict[str, str]], messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """All that comes from outside."""
    for turn in chat:
        yield from turn.values()
    for message in messages:
        yield from texts_of_calls(message.tool_calls)
    for tool in tools:
        yield from texts_of(tool.definition)


def _as_template_message(message: Message) -> dict[str, str]:
    if message.role not in ROLES:
        raise RequestError("bad_role", f"role {message.role!r} is unknown; it must be one of {', '.join(ROLES)}")
    turn: dict[str, str] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        reasoning, answer = split_reasoning(message)
        turn["content"] = answer
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
    return turn


def split_reasoning(message: Message) -> tuple[str | None, str]:
    """What an assistant's message thought and what it answered, also when the thoughts stand in its text."""
    if message.reasoning is not None:
        return message.reasoning, message.content
    for opening, closing in THINK_TAGS:
        block = re.match(rf"\s*{re.escape(opening)}(.*?){re.escape(closing)}\s*", message.content, re.DOTALL)
        if block:
            return block[1].strip(), message.content[block.end() :]
    return None, message.content


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"chat template {str(path)!r}: {error}. --chat-template takes auto, chatml, minicpm or a file."
        ) from error
