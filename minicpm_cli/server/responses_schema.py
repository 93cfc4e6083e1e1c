"""What clients may send to /v1/responses, in OpenAI's shapes. See `minicpm_cli.server.schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from minicpm_cli.server.schema import COUNT, Drawn, Loose, TemplateOptions, Text

LOGPROBS = "message.output_text.logprobs"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextOf(Loose):
    """A part of a message; what the model said comes back as output_text."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalOf(Loose):
    type: Literal["refusal"]
    refusal: Text


def _part(part: Any) -> str:
    return "[refusal]" if _type(part) == "refusal" else "[text]"


def _type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Part = Annotated[Annotated[TextOf, Tag("[text]")] | Annotated[RefusalOf, Tag("[refusal]")], Discriminator(_part)]


class MessageItem(Loose):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]


class CallItem(Loose):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text = "{}"


class ResultItem(Loose):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[TextOf]


class ThoughtOf(Loose):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Loose):
    type: Literal["reasoning"]
    summary: list[ThoughtOf] | None = None
    content: list[ThoughtOf] | None = None


def _kind(item: Any) -> str:
    return f"[{_type(item) or 'message'}]"  # in brackets, as what no field is called: see faults.invalid


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[ResultItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="the type is none of message, function_call, function_call_output and reasoning",
    ),
]


class TextFormat(Loose):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: Annotated[dict[Text, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: Text | None = None


class TextOptions(Loose):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Loose):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Loose):
    include_obfuscation: bool | None = None


class ResponsesRequest(Drawn):
    """POST /v1/responses: one answer. Of tools only functions are known; nothing runs in the background."""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=COUNT)] | None = None
    previous_response_id: Text | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[Text, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[Text, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Text] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    think_budget: Annotated[int, Field(ge=0, le=COUNT)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=COUNT)] | None = None
