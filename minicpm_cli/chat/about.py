"""Commands that tell what is going on: /stats, /prompt, /template."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.overflow import without
from minicpm_cli.llm.info import LLMInfo
from minicpm_cli.types import Usage


def stats(chat: Chat, argument: str) -> None:
    info, line = chat.llm.info, chat.terminal.line
    if chat.last:
        line(f"last reply: {chat.last.summary()}")
    line(f"{chat.replies} {'reply' if chat.replies == 1 else 'replies'} in all: {_usage(chat.total)}")
    looked_up = chat.llm.speculated
    if looked_up.drafts:
        line(
            f"lookup: {looked_up.accepted} of {looked_up.proposed} expected tokens came, "
            f"{looked_up.mean_accepted:.1f} more a step"
        )
    line(f"context: {chat.room()} of {info.context} tokens left")
    if chat.conversation.left_out:
        line(f"the {chat.conversation.left_out} oldest messages are not sent any more")
    line(f"memory: {_memory(chat, info)}")


def _usage(total: Usage) -> str:
    cached = f"{total.cached_tokens} cached"
    share = f", {total.cached_tokens / total.prompt_tokens:.0%}" if total.prompt_tokens else ""
    return f"{total.prompt_tokens} tokens in ({cached}{share}), {total.completion_tokens} out"


def _memory(chat: Chat, info: LLMInfo) -> str:
    peak = chat.llm.gpu_peak_bytes
    return (
        f"{info.weight_bytes / 1e9:.2f} GB weights ({info.scheme}), {info.cache_bytes / 1e9:.2f} GB cache "
        f"on {info.device}"
        + (f", {peak / 1e9:.2f} GB of the GPU at the most" if peak is not None else "")
        + _process_peak()
    )


def _process_peak() -> str:
    if sys.platform == "win32":
        return ""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"; {peak * (1 if sys.platform == 'darwin' else 1024) / 1e9:.2f} GB of main memory at the most"


def prompt(chat: Chat, argument: str) -> None:
    """Each token as its id and its text, so that what a message made of a control token shows."""
    messages = without(chat.conversation.messages, chat.conversation.left_out)
    if argument or chat.attached or not messages:
        messages = (*messages, chat.question(argument or ("" if chat.attached else "...")))
    ids = chat.llm.prompt(chat.request(messages))
    for row in _rows([f"{ident}:{piece!r}" for ident, piece in chat.llm.pieces(ids)]):
        chat.terminal.line(row)
    chat.terminal.line(f"({len(ids)} tokens)")


def _rows(words: list[str]) -> Iterator[str]:
    """Rows no longer than the terminal's; a token with a line's end is the last of its row."""
    columns, row = shutil.get_terminal_size().columns - 1, ""
    for word in words:
        if row and len(row) + 2 + len(word) > columns:
            yield row
            row = ""
        row += f"  {word}" if row else word
        if "\\n" in word:
            yield row
            row = ""
    if row:
        yield row


def template(chat: Chat, argument: str) -> None:
    info = chat.llm.info
    chat.terminal.line(f"chat template: {info.template} (another one: minicpm chat --chat-template)")
    chat.terminal.line(info.template_source)
