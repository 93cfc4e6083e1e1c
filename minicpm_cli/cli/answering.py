"""The answer to one question: streamed to stdout, or in one piece once it is there."""

from __future__ import annotations

import json
import select
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from minicpm_cli.chat.code_block import last_code_block
from minicpm_cli.chat.reply import Reply
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.chat.waiting import Waiting
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.text.tools import as_json
from minicpm_cli.types import Request

_LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this number
_GONE = select.POLLERR | select.POLLHUP if hasattr(select, "poll") else 0


@dataclass(frozen=True, slots=True)
class Form:
    """In which form the answer comes out: as text, as its last code block, or as a JSON record."""

    extract: bool = False
    json: bool = False

    @property
    def streamed(self) -> bool:
        return not (self.extract or self.json)


def answer(llm: LanguageModel, request: Request, terminal: Terminal, form: Form) -> Reply:
    """Raises BrokenPipeError as soon as nobody reads any more, also while nothing is written yet."""
    reply = Reply(request.prefill)
    from minicpm_cli.chat.view import Awaited, PlainView

    view = Awaited(PlainView(terminal), Waiting(terminal, what="reading" if form.streamed else "answering"))
    if form.streamed:
        view.show("answer", request.prefill)
    try:
        with closing(llm.stream([request])) as events:
            for event in reply.follow(events):
                if form.streamed or (event.channel == "think" and not form.json):
                    view.show(event.channel, event.text)
                if reader_gone(terminal.out):
                    raise BrokenPipeError
    finally:
        view.end()
    if form.json:
        terminal.answer(json.dumps(record(llm, request, reply), ensure_ascii=False) + "\n")
    elif form.extract and (block := last_code_block(reply.text)) is not None:
        terminal.answer(f"{block}\n")
    return reply


def finish(reply: Reply, terminal: Terminal, form: Form) -> int:
    """What is to be said of the answer, and the exit code."""
    if reply.cut:
        count = reply.usage.completion_tokens if reply.usage else 0
        where = "while the model was still thinking " if reply.thought and not reply.text else ""
        terminal.note(f"the answer was cut {where}at {count} tokens; -n N allows more, as far as --ctx does")
    if reply.unanswered:
        terminal.note(f"the model ended its answer {'behind its thoughts' if reply.thought else 'with nothing in it'}")
    if reply.finish == "malformed_tool_call":
        terminal.note("what began as a call of a tool was none; the text has it as it came")
    if reply.thought_out:
        terminal.note("the budget for thinking was used up, so the answer may be hasty; --think-budget N allows more")
    if reply.incomplete:
        terminal.note("the answer is not whole: it ended before it was what the schema or regex asks for")
    terminal.detail(reply.summary())
    if form.extract and last_code_block(reply.text) is None:
        terminal.line("minicpm: there is no fenced code block in the answer:")
        terminal.line(reply.text)
        return 1
    return int(reply.incomplete)


def record(llm: LanguageModel, request: Request, reply: Reply) -> dict[str, Any]:
    """The record of --json."""
    usage, timings = reply.usage, reply.timings
    assert usage is not None, "a reply that ended has both"
    assert timings is not None
    logprobs = _logprobs(llm, reply)
    return {
        "id": request.id,
        "model": llm.info.name,
        "text": reply.text,
        "think": reply.thought,
        **({"tool_calls": as_json(reply.tool_calls)} if reply.tool_calls else {}),
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
        **({"incomplete": True} if reply.incomplete else {}),
        **({"think_budget_spent": True} if reply.thought_out else {}),
        **({"logprobs": logprobs} if logprobs else {}),
    }


def _logprobs(llm: LanguageModel, reply: Reply) -> list[dict[str, Any]]:
    """Each token with its text; each of its rivals as its id, its log-probability and its text."""
    ids = {token for place in reply.logprobs for token in (place.token, *(rival for rival, _ in place.top))}
    texts = dict(llm.pieces(sorted(ids)))
    return [
        {
            "token": place.token,
            "text": texts[place.token],
            "logprob": max(place.logprob, _LEAST_LOGPROB),
            "top": [[rival, max(logprob, _LEAST_LOGPROB), texts[rival]] for rival, logprob in place.top],
        }
        for place in reply.logprobs
    ]


def reader_gone(stream: TextIO) -> bool:
    """Whether the other end of a pipe was closed. A write would tell, too, but a thinking model writes nothing."""
    with suppress(OSError, ValueError):
        poll = select.poll() if _GONE else None
        if poll is not None:
            poll.register(stream.fileno(), 0)
            return any(state & _GONE for _, state in poll.poll(0))
    return False
