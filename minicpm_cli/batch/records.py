"""One input line in, one `Row` out, always: a request that can be run or an error with a fixed code.

Never raises for what a line contains: bytes that are no text, JSON a mile deep, numbers of 5,000 digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from minicpm_cli.batch import openai
from minicpm_cli.batch.keys import Id, id_key, line_key
from minicpm_cli.batch.lines import LONGEST, Line
from minicpm_cli.batch.messages import conversation, unicode_text
from minicpm_cli.errors import RequestError
from minicpm_cli.text.tools import tool_choice_of, tools_of
from minicpm_cli.types import Message, SamplingParams, Tool, ToolChoice, check_sampling

Kind = Literal["simple", "chat", "completion"]
Fill = Callable[[Mapping[str, Any]], tuple[str | None, str]]

CODES = (
    "invalid_json",
    "not_an_object",
    "missing_prompt",
    "bad_role",
    "bad_parameter",
    "context_overflow",
    "schema_invalid",
    "schema_incomplete",
    "internal",
)

_MESSAGE_LIMIT = 500  # characters: an error row must not carry a 50 MB value back
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
_SIMPLE = _SAMPLING | {"id", "custom_id", "prompt", "messages", "system", *_CALLS}
_OPENAI = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class RowError:
    """`code` is one of CODES."""

    code: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RowError:
        code = getattr(error, "code", None)
        text = str(error) or type(error).__name__
        clipped = text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + " ..."
        return cls(code if code in CODES else "internal", clipped)


@dataclass(frozen=True, slots=True)
class Style:
    """How simple lines are read: `raw` prompts skip the chat template, `system` stands in where a line has none.

    `fill` makes the system prompt, None for none, and the prompt of a line. It raises RequestError.
    """

    raw: bool = False
    system: str | None = None
    keep_input: bool = False
    fill: Fill | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line as it was understood. `named` is False when the id could not be read; `id` is the line number then.

    `messages` is a string for a raw prompt. `given` holds checked sampling parameters. `extra` is the
    JSON text of the keys to pass through. `size` is the line's, in bytes.
    """

    line: int
    id: Id
    named: bool = False
    kind: Kind = "simple"
    messages: tuple[Message, ...] | str = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None
    error: RowError | None = None
    size: int = 0
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def key(self) -> bytes:
        return id_key(self.id) if self.named else line_key(self.line)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Every key under which an earlier run may have recorded this row (see `journal.row_key`)."""
        return (self.key, line_key(self.line)) if self.id == self.line else (self.key,)

    def failed(self, error: BaseException) -> Row:
        return replace(self, error=RowError.of(error))


def parse(line: Line, style: Style, fallback: Kind = "simple") -> Row:
    """`fallback` is the kind to answer in when the line itself does not tell."""
    guess: Kind = "chat" if b'"custom_id"' in line.data else fallback
    number, size = line.number, len(line.data)
    kind, named, extra = guess, False, None
    id_: Id = number
    try:
        obj = load(line)
        kind = _kind(obj)
        id_, named = identify(obj, number), True
        if style.keep_input:
            extra = _extra(obj, kind)
        messages, given = _simple(obj, style) if kind == "simple" else _envelope(obj, style)
        tools, choice = _tools(obj if kind == "simple" else obj["body"], messages)
        return Row(
            *(number, id_, named, kind, messages, _checked(given), extra), size=size, tools=tools, tool_choice=choice
        )
    except RequestError as e:
        error = RowError.of(e)
    except RecursionError:
        error = RowError("invalid_json", "the line is nested too deeply")
    except Exception as e:  # noqa: BLE001 - a fault of ours, or no memory for the line: the others are none the worse
        error = RowError.of(e)
    return Row(number, id_, named, kind, extra=extra, error=error, size=size)


def load(line: Line) -> dict[str, Any]:
    """The line's JSON object. Raises RequestError(invalid_json | not_an_object), or RecursionError."""
    if line.too_long:
        raise RequestError("invalid_json", f"the line is longer than {LONGEST >> 20} MiB, the most that is read of one")
    try:
        obj = _parsed(_decoded(line))
    except json.JSONDecodeError as e:
        raise RequestError("invalid_json", f"not JSON: {e.msg} at character {e.pos + 1} of the line") from None
    except ValueError:
        raise RequestError("invalid_json", "a whole number in the line has too many digits") from None
    if not isinstance(obj, dict):
        raise RequestError("not_an_object", f"the line is {_NAMES[type(obj)]}; a row is an object {{...}}")
    return obj


def read_id(line: Line) -> bytes | None:
    """The key of the line's id, None where it cannot be read."""
    try:
        return id_key(identify(load(line), line.number))
    except (RequestError, RecursionError):
        return None


def read_keys(line: Line) -> tuple[bytes, ...]:
    """All keys under which an output row may stand for this line (see `Row.keys`)."""
    key = read_id(line)
    by_line = line_key(line.number)
    if key is None:
        return (by_line,)
    return (key, by_line) if key == id_key(line.number) else (key,)


def in_shard(number: int, shard: tuple[int, int] | None) -> bool:
    """Shard i of n takes the lines whose number leaves the rest i (n itself counts as 0)."""
    return shard is None or number % shard[1] == shard[0] % shard[1]


def identify(obj: Mapping[str, Any], number: int) -> Id:
    """The id as it was given, string or number; a missing one becomes the line number."""
    name = "id" if obj.get("id") is not None and not isinstance(obj.get("body"), dict) else "custom_id"
    value = obj.get(name)
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RequestError("bad_parameter", f"{name} is {_NAMES[type(value)]}; it must be a string or a number")
    return value


_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _decoded(line: Line) -> str:
    try:
        return line.data.decode("utf-8")
    except UnicodeDecodeError as e:
        hint = " It looks like UTF-16; convert it first." if line.data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        where = f"byte {e.start + 1} of the line, byte {line.offset + e.start} of the input"
        raise RequestError("invalid_json", f"not UTF-8 at {where}: {e.reason}.{hint}") from None


def _no_constant(name: str) -> NoReturn:
    raise RequestError("invalid_json", f"not JSON: {name} is not a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise RequestError("invalid_json", f"the number {digits[:40]} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _parsed(text: str) -> Any:
    """`decode` looks for white space first, which costs as much as a short line."""
    if text.startswith("{"):
        with suppress(json.JSONDecodeError):
            obj, end = _DECODER.raw_decode(text)
            if end == len(text):
                return obj
    return _DECODER.decode(text)


def _kind(obj: Mapping[str, Any]) -> Kind:
    """A `body` object makes a line OpenAI's; so does a custom_id without any prompt of its own."""
    bare = "custom_id" in obj and "prompt" not in obj and "messages" not in obj
    if not isinstance(obj.get("body"), dict) and not bare:
        return "simple"
    return "completion" if openai.is_completion(obj) else "chat"


def _extra(obj: Mapping[str, Any], kind: Kind) -> str:
    known = _SIMPLE if kind == "simple" else _OPENAI
    return json.dumps({k: v for k, v in obj.items() if k not in known}, ensure_ascii=False)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = check_sampling(given)
    except (OverflowError, ValueError):
        raise RequestError("bad_parameter", "a sampling parameter is too large a number") from None
    for stop in checked.get("stop", ()):
        unicode_text("stop", stop)
    return checked


def _envelope(obj: Mapping[str, Any], style: Style) -> tuple[tuple[Message, ...] | str, dict[str, Any]]:
    if style.fill is not None:
        raise RequestError("bad_parameter", "--template takes lines of its variables, with an id, not OpenAI's")
    return openai.request(obj)


def _tools(asked: Mapping[str, Any], messages: tuple[Message, ...] | str) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tools_of(asked.get("tools"))
    if tools and isinstance(messages, str):
        raise RequestError("bad_parameter", "tools: a raw prompt has no place for them; send messages")
    return tools, tool_choice_of(asked.get("tool_choice"), tools, parallel=asked.get("parallel_tool_calls"))


def _simple(obj: Mapping[str, Any], style: Style) -> tuple[tuple[Message, ...] | str, dict[str, Any]]:
    given = {name: obj[name] for name in _SAMPLING if obj.get(name) is not None}
    if "schema" in given and not isinstance(given["schema"], str):
        given["schema"] = json.dumps(given["schema"])
    return _asked(obj, style), given


def _asked(obj: Mapping[str, Any], style: Style) -> tuple[Message, ...] | str:
    prompt, messages, system = obj.get("prompt"), obj.get("messages"), obj.get("system")
    if prompt is not None and messages is not None:
        raise RequestError("bad_parameter", "the line has both prompt and messages; give one of them")
    if style.raw and (messages is not None or system is not None):
        raise RequestError("bad_parameter", "--raw takes lines with a prompt alone, without messages or system")
    if messages is not None and style.fill is not None:
        raise RequestError("bad_parameter", "--template makes the prompt, and the line has messages")
    if messages is not None:
        return _with_system(conversation(messages), system, style.system)
    filled, text = (None, _prompt(prompt)) if style.fill is None else style.fill(obj)
    text, default = unicode_text("prompt", text), filled if style.system is None else style.system
    return text if style.raw else _with_system((Message("user", text),), system, default)


def _prompt(prompt: Any) -> str:
    if prompt is None or prompt == "":
        raise RequestError("missing_prompt", "the line has no prompt: give it a prompt or messages")
    return unicode_text("prompt", prompt)


def _with_system(talk: tuple[Message, ...], own: Any, default: str | None) -> tuple[Message, ...]:
    led = talk[0].role == "system"
    if own is not None and led:
        raise RequestError("bad_parameter", "the line has a system prompt twice: in system and in messages")
    if own is not None:
        return (Message("system", unicode_text("system", own)), *talk)
    return talk if default is None or led else (Message("system", default), *talk)
