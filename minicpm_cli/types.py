"""The few types that every layer shares. No torch here, so that `minicpm --help` stays fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from minicpm_cli.errors import RequestError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
MOST_BIAS = 100  # of a token's score, as OpenAI has it
Channel = Literal["think", "answer"]
FinishReason = Literal["stop", "length", "cancelled", "error", "tool_calls", "malformed_tool_call"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call on its way: the first of each `index` has its id and name, all together its arguments.

    `void`: what was begun was no call, or was cut off; its text follows as content.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    void: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, `definition` what the template is given."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call, or must; `name` is the one function that it must call then.

    Not `parallel`: at most one call an answer.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `reasoning` is what an assistant thought, without its tags.

    An assistant's turn may hold `tool_calls`, a tool's turn the result of the one with `tool_call_id`.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Every value is concrete; build it with `checked` from what a user gave.

    temperature 0 is argmax; top_k 0 and top_p 1 mean off; top_p 0 keeps the most likely token only.
    `max_tokens` None means: what is left of the context. `seed` None means: drawn afresh.
    `logprobs` N returns the N most likely tokens' log-probabilities beside the chosen one's.
    `think` None leaves the template's default. `schema` (JSON text) or `regex` constrains the answer, not the thinking;
    `{"type": "object"}` is any JSON object. `logit_bias` are tokens and what is added to their scores.
    No answer ends by itself before `min_tokens`; a stop string ends it.
    With `ignore_eos` an answer goes on where the model would end it, unless a schema or regex says where that is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    think: bool | None = None
    think_budget: int | None = None
    schema: str | None = None
    regex: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False

    def checked(self, given: Mapping[str, Any]) -> SamplingParams:
        """These parameters with `given` laid over them. Raises RequestError(bad_parameter).

        A schema takes the place of a regex, and a regex that of a schema.
        """
        over = check_sampling(given)
        under = replace(self, schema=None, regex=None) if over.keys() & {"schema", "regex"} else self
        return replace(under, **over)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the monotonic clock, from the moment the engine saw the request."""

    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    def prefill_rate(self, usage: Usage) -> float:
        """Prompt tokens computed (not cached) a second."""
        seconds = self.first_token_seconds - self.queued_seconds
        return (usage.prompt_tokens - usage.cached_tokens) / seconds if seconds > 0 else 0.0

    def decode_rate(self, usage: Usage) -> float:
        """Tokens a second after the first one."""
        seconds = self.total_seconds - self.first_token_seconds
        return (usage.completion_tokens - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token, its log-probability, and the most likely tokens at its place as (id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks: a conversation, or a raw prompt when `messages` is a string.

    `ids` are the prompt's tokens where it was encoded ahead of its turn, `channel` is where its answer begins then.
    """

    id: str
    messages: tuple[Message, ...] | str
    params: SamplingParams = field(default_factory=SamplingParams)
    prefill: str = ""
    ids: Sequence[int] | None = None
    channel: Channel = "answer"
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer. The last event of a request carries `finish`, `usage` and `timings`.

    An event with `tool_call` has no text. `finish` is "tool_calls" where the answer called, "malformed_tool_call"
    where something that began as a call was none and came as text. `error` is set when the request failed; the others
    go on. `incomplete`: the answer was cut before it was what its schema or regex asks for;
    `thought_out`: the budget for thinking ended it.
    """

    id: str
    text: str = ""
    channel: Channel = "answer"
    finish: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    seed: int | None = None
    logprobs: tuple[Logprob, ...] = ()
    error: Exception | None = None
    tool_call: ToolCallDelta | None = None
    incomplete: bool = False
    thought_out: bool = False


class TokenSink(Protocol):
    """What the engine knows of a request's text: it is told each token and may end the request."""

    def push(self, token: int) -> FinishReason | None: ...


class TokenMask(Protocol):
    """Structured output: which tokens may come next. `row` is an int32 bitmask, 32 tokens a word.

    `accept` is told each token that does not end the answer, and may end it.
    """

    def fill(self, row: Any) -> None: ...
    def accept(self, token: int) -> FinishReason | None: ...


def check_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `given` that are not None, checked for name, type and range.

    Raises RequestError with code bad_parameter that names the parameter, the value and its range.
    """
    names = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(given) - names)
    if unknown:
        raise RequestError("bad_parameter", f"unknown sampling parameter {unknown[0]!r}")
    return {name: _CHECKS[name](name, value) for name, value in given.items() if value is not None}


def _number(low: float, high: float, *, low_open: bool = False) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not fits or value == math.inf or (low_open and value == low):
            open_, high_ = "(" if low_open else "[", "inf)" if high == math.inf else f"{high:g}]"
            raise _bad(name, value, f"a number in {open_}{low:g}, {high_}")
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            raise _bad(name, str(value)[:20] + "...", "a number that a computer can hold") from None

    return check


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _bad(name, value, f"a whole number from {low} to {high}")
        return value

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "a string")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise _bad(name, value, "a non-empty string or a list of them")
    return tuple(stops)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Of {id: bias}, of such pairs, or of texts ID=BIAS."""
    pairs = value.items() if isinstance(value, Mapping) else value
    bias = _number(-MOST_BIAS, MOST_BIAS)
    try:
        split = [pair.split("=") if isinstance(pair, str) else pair for pair in pairs]
        found = {int(token): bias(name, float(by) if isinstance(by, str) else by) for token, by in split}
        whole = not isinstance(value, str) and all(not isinstance(token, float | bool) for token, _ in split)
    except (TypeError, ValueError):
        whole = False
    if not whole or not all(0 <= token < 2**31 for token in found):
        raise _bad(name, value, f"ids of tokens, each with a number from -{MOST_BIAS} to {MOST_BIAS}")
    return tuple(sorted(found.items()))


def _bad(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError("bad_parameter", f"{name} is {value!r}; it must be {wanted}")


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _number(0, math.inf),
    "top_p": _number(0, 1),
    "top_k": _integer(0, 2**31 - 1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, math.inf, low_open=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "max_tokens": _integer(1, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "stop": _stops,
    "seed": _integer(0, 2**64 - 1),
    "logprobs": _integer(0, 20),
    "think": _boolean,
    "think_budget": _integer(0, 2**31 - 1),
    "schema": _text,
    "regex": _text,
    "logit_bias": _biases,
    "ignore_eos": _boolean,
}
