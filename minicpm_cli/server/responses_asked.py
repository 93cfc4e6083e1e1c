"""What a client asked of /v1/responses -> our request: items become the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minicpm_cli.server.asked import schema_of, shared, thinks
from minicpm_cli.server.faults import refused
from minicpm_cli.server.responses_schema import (
    LOGPROBS,
    CallItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalOf,
    ResponsesRequest,
    ResultItem,
    TextOf,
)
from minicpm_cli.text.tools import arguments_of, check_results, tool_choice_of, tools_of
from minicpm_cli.types import Message, Request, SamplingParams, ToolCall

_IGNORED = ("reasoning.encrypted_content",)  # of `include`: thoughts are never encrypted here


def response_params(asked: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises Refused or RequestError."""
    given = shared(asked)
    given["max_tokens"] = asked.max_output_tokens
    given["think"] = thinks(asked.chat_template_kwargs, asked.reasoning.effort if asked.reasoning else None)
    given["think_budget"] = asked.think_budget
    if asked.text and (form := asked.text.format):
        given["schema"] = schema_of(form.type, form.schema_, "text.format.schema")
    for name in asked.include or ():
        if name not in (LOGPROBS, *_IGNORED):
            raise refused(400, f"include: {name!r} is not supported, only {LOGPROBS}", "invalid_value", "include")
    if LOGPROBS in (asked.include or ()):
        given["logprobs"] = asked.top_logprobs or 0
    elif asked.top_logprobs:
        raise refused(400, f"top_logprobs needs include: [{LOGPROBS!r}]", "invalid_value", "top_logprobs")
    return defaults.checked(given)


def response_prompt(ident: str, asked: ResponsesRequest, turns: Sequence[Message], params: SamplingParams) -> Request:
    """The request of a conversation, `turns` before which the instructions stand. Raises Refused and RequestError."""
    if not turns:
        raise refused(400, "input: there is no message in it", "invalid_value", "input")
    system = (Message("system", asked.instructions),) if asked.instructions else ()
    check_results(turns, "input")
    tools = tools_of([_as_chat(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)] if asked.tools else None)
    choice = tool_choice_of(_named(asked.tool_choice), tools, parallel=asked.parallel_tool_calls)
    return Request(ident, (*system, *turns), params, tools=tools, tool_choice=choice)


def _as_chat(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the shape of the older call, where a function stands in a member of its own."""
    if tool.get("type") != "function":
        raise refused(400, f'{where}.type: only "function" is known', "invalid_value", f"{where}.type")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _named(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


# ---- items --------------------------------------------------------------------------------------------------------


def turns_of(given: str | Sequence[Item]) -> tuple[Message, ...]:
    """The messages of an input. Raises RequestError."""
    if isinstance(given, str):
        return (Message("user", given),)
    return tuple(_turns(given))


@dataclass(slots=True)
class _Assistant:
    """A turn of the assistant, which comes as several items: a thought, a text and calls, in this order."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def takes(self, item: object) -> bool:
        """Whether the item belongs to this turn, and does not begin another."""
        if isinstance(item, CallItem):
            return True
        if isinstance(item, ReasoningItem):
            return not self.texts and not self.calls
        return isinstance(item, MessageItem) and item.role == "assistant" and not self.texts and not self.calls

    def message(self) -> Iterator[Message]:
        if self.thoughts or self.texts or self.calls:
            thought = "\n".join(self.thoughts) if self.thoughts else None
            yield Message("assistant", "\n".join(self.texts), thought, tuple(self.calls))


def _turns(items: Sequence[Item]) -> Iterator[Message]:
    turn = _Assistant()
    for i, item in enumerate(items):
        if not turn.takes(item):
            yield from turn.message()
            turn = _Assistant()
        if isinstance(item, CallItem):
            arguments = arguments_of(item.arguments, f"input[{i}].arguments")
            turn.calls.append(ToolCall(item.call_id, item.name, arguments))
        elif isinstance(item, ReasoningItem):
            turn.thoughts += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, ResultItem):
            yield Message("tool", _text(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            turn.texts.append(_text(item.content))
        else:
            yield Message("system" if item.role == "developer" else item.role, _text(item.content))
    yield from turn.message()


def _text(content: str | Sequence[TextOf | RefusalOf]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalOf) else part.text for part in content)
