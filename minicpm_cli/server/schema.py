"""What clients may send, in OpenAI's shapes: FastAPI checks it, and our OpenAPI document says it.

As OpenAI does, unknown fields are refused by name. Known ones that cannot change the answer are taken and not used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from minicpm_cli.types import MOST_BIAS


def _unicode(text: str) -> str:
    """JSON allows half a surrogate pair, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start + 1}") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]
MAX_CHOICES, MAX_BIASES = 128, 1024
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]  # its id; names of members are texts in JSON
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
_SEED = 2**63 - 1
COUNT = 2**31 - 1


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Loose(BaseModel):
    """Parts of a conversation: clients send back what they were given, with whatever else their libraries add."""

    model_config = ConfigDict(strict=True, extra="ignore")


# ---- conversations ------------------------------------------------------------------------------------------------


class TextPart(Loose):
    type: Literal["text"]
    text: Text


class FunctionOfCall(Loose):
    name: Text
    arguments: Text = "{}"


class CallMade(Loose):
    """A call in the history of a conversation."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionOfCall


class ChatMessage(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    reasoning_content: Text | None = None
    tool_calls: list[CallMade] | None = None
    tool_call_id: Text | None = None


# ---- calls --------------------------------------------------------------------------------------------------------


class StreamOptions(Loose):
    include_usage: bool | None = None


class JsonSchema(Loose):
    name: Text | None = None
    schema_: Annotated[dict[Text, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: Text | None = None


class ResponseFormat(Loose):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TemplateOptions(Strict):
    enable_thinking: bool | None = None


class Drawn(Strict):
    """The fields that all calls share."""

    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-_SEED - 1, le=_SEED)] | None = None
    stop: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=64)]
        | None
    ) = None
    stream: bool | None = None
    regex: Text | None = None
    logit_bias: Annotated[dict[Token, Bias], Field(max_length=MAX_BIASES)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=COUNT)] | None = None
    # They change nothing here.
    user: Text | None = None
    metadata: dict[Text, Any] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class Sampling(Drawn):
    """And those of chat and completions."""

    max_tokens: Annotated[int, Field(ge=1, le=COUNT)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions. `top_k` to `repetition_penalty`, `regex` and `think_budget` are not OpenAI's.

    With `continue_final_message` the last message is the beginning of the answer, as vLLM has it.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[Text, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[Text, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    think_budget: Annotated[int, Field(ge=0, le=COUNT)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Ids = Annotated[list[Annotated[int, Field(ge=0, le=COUNT)]], Field(min_length=1)]


class CompletionRequest(Sampling):
    """POST /v1/completions: a prompt without a template, as text or as tokens, or several of them."""

    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Text, Field(max_length=0)] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: either a text or a conversation, as the model would read it."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[dict[Text, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0, le=COUNT)]]


# ---- answers that are no streams ----------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok", "draining", "failed"]
