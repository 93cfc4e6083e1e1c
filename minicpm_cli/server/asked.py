"""What a client asked -> our requests: messages, sampling values, and which server-wide values they are laid over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minicpm_cli.errors import ContextOverflow
from minicpm_cli.server.faults import refused
from minicpm_cli.server.schema import (
    CallMade,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Drawn,
    ResponseFormat,
    Sampling,
    TemplateOptions,
)
from minicpm_cli.text.tools import arguments_of, check_results, tool_choice_of, tools_of
from minicpm_cli.types import Message, Request, Role, SamplingParams, ToolCall

_PASSED = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "regex", "logit_bias", "ignore_eos", "min_tokens"),
)
_COMPLETION_TOKENS = 16  # OpenAI's own, where a completion does not say how long it may be
_ANY_OBJECT = '{"type": "object"}'
_SEED_MASK = 2**64 - 1
_NO_TEXT = ("assistant",)  # roles whose message may consist of calls alone


def chat_params(asked: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises Refused or RequestError."""
    given = _numbered(asked)
    if asked.max_completion_tokens is not None:
        given["max_tokens"] = asked.max_completion_tokens
    if asked.top_logprobs and not asked.logprobs:
        raise refused(400, "top_logprobs needs logprobs: true", "invalid_value", "top_logprobs")
    if asked.logprobs:
        given["logprobs"] = asked.top_logprobs or 0
    given["think"] = thinks(asked.chat_template_kwargs, asked.reasoning_effort)
    given["think_budget"] = asked.think_budget
    given["schema"] = _schema(asked.response_format)
    return defaults.checked(given)


def completion_params(asked: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises Refused or RequestError."""
    given = _numbered(asked)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise refused(400, "best_of: only the value of n is supported", "invalid_value", "best_of")
    if asked.echo and asked.logprobs is not None:
        raise refused(400, "echo with logprobs is not supported: a prompt's own are not computed", None, "echo")
    given["logprobs"] = asked.logprobs
    if defaults.max_tokens is None:
        given.setdefault("max_tokens", _COMPLETION_TOKENS)
    return defaults.checked(given)


def _numbered(asked: Sampling) -> dict[str, Any]:
    if asked.stream_options is not None and not asked.stream:
        raise refused(400, "stream_options needs stream: true", "invalid_value", "stream_options")
    return shared(asked) | ({} if asked.max_tokens is None else {"max_tokens": asked.max_tokens})


def shared(asked: Drawn) -> dict[str, Any]:
    """The sampling values that every call may bring."""
    given = {name: value for name in _PASSED if (value := getattr(asked, name)) is not None}
    if asked.top_k is not None:
        given["top_k"] = max(0, asked.top_k)  # -1 turns it off, too
    if asked.seed is not None:
        given["seed"] = asked.seed & _SEED_MASK
    return given


def thinks(options: TemplateOptions | None, effort: str | None) -> bool | None:
    if options is not None and options.enable_thinking is not None:
        return options.enable_thinking
    return False if effort == "none" else None


def _schema(form: ResponseFormat | None) -> str | None:
    if form is None:
        return None
    where = "response_format.json_schema"
    return schema_of(form.type, form.json_schema.schema_ if form.json_schema else None, f"{where}.schema", where)


def schema_of(kind: str, schema: Mapping[str, Any] | None, where: str, param: str | None = None) -> str | None:
    """The JSON schema of an answer in the format `kind`, as text.

    Raises Refused where there is none at `where`; `param` is what it names then, if that is something else.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if schema is None:
        raise refused(400, f"{where} is missing", "missing_parameter", param or where)
    return json.dumps(schema, ensure_ascii=False)


# ---- conversations ------------------------------------------------------------------------------------------------


def conversation(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises Refused where a message says nothing."""
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(where: str, given: ChatMessage) -> Message:
    role: Role = "system" if given.role == "developer" else given.role
    calls = tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(given.tool_calls or ()))
    if calls and role != "assistant":
        raise refused(400, f"{where}.tool_calls: only an assistant calls", "invalid_value", f"{where}.tool_calls")
    if given.content is None and not (calls and role in _NO_TEXT):
        raise refused(400, f"{where}.content is missing or null", "missing_parameter", f"{where}.content")
    return Message(role, _text(given), given.reasoning_content, calls, given.tool_call_id)


def _text(given: ChatMessage) -> str:
    if isinstance(given.content, list):
        return "\n".join(part.text for part in given.content)
    return given.content or ""


def _call(where: str, call: CallMade) -> ToolCall:
    return ToolCall(call.id, call.function.name, arguments_of(call.function.arguments, f"{where}.function.arguments"))


def chat_prompt(ident: str, asked: ChatRequest, params: SamplingParams) -> Request:
    """The request of a conversation. Raises Refused and RequestError."""
    messages, prefill = conversation(asked.messages), ""
    if asked.continue_final_message:
        if messages[-1].role != "assistant" or messages[-1].tool_calls or len(messages) == 1:
            where = "continue_final_message"
            raise refused(400, f"{where}: the last message is none that an assistant began", "invalid_value", where)
        messages, prefill = messages[:-1], messages[-1].content
    elif asked.add_generation_prompt is False:
        where = "add_generation_prompt"
        raise refused(400, f"{where}: false needs continue_final_message", "invalid_value", where)
    return _with_tools(Request(ident, messages, params, prefill), asked)


def _with_tools(request: Request, asked: ChatRequest) -> Request:
    """The request with what the model may call. Raises RequestError."""
    tools = tools_of(asked.tools)
    if not isinstance(request.messages, str):
        check_results(request.messages)
    choice = tool_choice_of(asked.tool_choice, tools, parallel=asked.parallel_tool_calls)
    return replace(request, tools=tools, tool_choice=choice)


# ---- choices ------------------------------------------------------------------------------------------------------


def choices(base: str, prompts: Sequence[Request], count: int) -> list[Request]:
    """`count` requests of each prompt, prompt by prompt; of one seed, each choice makes its own."""
    return [_choice(prompt, f"{base}-{i * count + j}", j) for i, prompt in enumerate(prompts) for j in range(count)]


def _choice(prompt: Request, ident: str, place: int) -> Request:
    params = prompt.params
    if params.seed is not None and place:
        params = replace(params, seed=(params.seed + place) & _SEED_MASK)
    return replace(prompt, id=ident, params=params)


def check_length(request: Request, context: int) -> None:
    """Raises ContextOverflow before the request takes a place in the queue."""
    wanted = 1 if request.params.max_tokens is None else request.params.max_tokens
    if len(request.ids or ()) + wanted > context:
        raise ContextOverflow(len(request.ids or ()), wanted, context)


def prompts_of(asked: CompletionRequest) -> list[str | list[int]]:
    """One entry for each prompt of the call: its text, or its tokens."""
    given: Any = asked.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)
