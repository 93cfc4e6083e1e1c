"""JSON messages in OpenAI's shape -> our `Message`s, or a RequestError that names the message and what is wrong."""

from __future__ import annotations

from typing import Any, cast

from minicpm_cli.errors import RequestError
from minicpm_cli.text.tools import check_results, tool_calls_of
from minicpm_cli.types import ROLES, Message, Role


def conversation(messages: Any) -> tuple[Message, ...]:
    """Raises RequestError with missing_prompt, bad_role or bad_parameter."""
    if not isinstance(messages, list):
        raise RequestError("bad_parameter", "messages is not a list of {role, content} objects")
    if not messages:
        raise RequestError("missing_prompt", "messages is empty")
    talk = tuple(_message(f"messages[{i}]", m) for i, m in enumerate(messages))
    check_results(talk)
    return talk


def unicode_text(name: str, value: Any) -> str:
    """`value` if it is text that UTF-8 can hold: JSON allows half a surrogate pair, tokenizers do not."""
    if not isinstance(value, str):
        raise RequestError("bad_parameter", f"{name} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise RequestError("bad_parameter", f"{name} has half a surrogate pair at character {e.start + 1}") from None
    return value


def _message(where: str, raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise RequestError("bad_parameter", f"{where} is not an object")
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in ROLES:
        raise RequestError("bad_role", f"{where}.role is {raw.get('role')!r}; it must be one of {', '.join(ROLES)}")
    calls = tool_calls_of(raw.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise RequestError("bad_parameter", f"{where}.tool_calls: only an assistant calls")
    silent = calls and raw.get("content") is None
    content = "" if silent else _content(f"{where}.content", raw.get("content"))
    reasoning = raw.get("reasoning_content", raw.get("reasoning"))
    thought = None if reasoning is None else unicode_text(f"{where}.reasoning_content", reasoning)
    answered = raw.get("tool_call_id")
    if answered is not None:
        answered = unicode_text(f"{where}.tool_call_id", answered)
    return Message(cast(Role, role), content, thought, calls, answered)


def _content(where: str, content: Any) -> str:
    if content is None:
        raise RequestError("missing_prompt", f"{where} is missing or null")
    if isinstance(content, list):
        return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
    return unicode_text(where, content)


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError("bad_parameter", f"{where} is of type {kind!r}; only text parts can be read")
    return unicode_text(f"{where}.text", part.get("text"))
