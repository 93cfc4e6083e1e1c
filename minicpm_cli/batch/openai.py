"""Lines of OpenAI's batch API: {custom_id, method, url, body}. What would change the answer and cannot be
done is refused by name; what cannot change it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minicpm_cli.batch.messages import conversation, unicode_text
from minicpm_cli.errors import RequestError
from minicpm_cli.types import Message

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_PASSED = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("stop", "seed", "max_tokens", "think", "think_budget", "regex", "logit_bias", "ignore_eos"),
        "min_tokens",
    )
)
_HANDLED = frozenset(
    (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "response_format",
    )
)
_IGNORED = frozenset(
    (
        *("messages", "prompt", "model", "user", "metadata", "store", "stream", "stream_options", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    )
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}


def is_completion(line: Mapping[str, Any]) -> bool:
    body = line.get("body")
    bare = isinstance(body, dict) and "prompt" in body and "messages" not in body
    return line.get("url") == COMPLETIONS or (line.get("url") is None and bare)


def request(line: Mapping[str, Any]) -> tuple[tuple[Message, ...] | str, dict[str, Any]]:
    """(messages or raw prompt, sampling parameters still to be checked). Raises RequestError."""
    method, url, body = line.get("method") or "POST", line.get("url"), line.get("body")
    if method != "POST":
        raise RequestError("bad_parameter", f"method is {method!r}; it must be POST")
    if url not in (None, CHAT, COMPLETIONS):
        raise RequestError("bad_parameter", f"url is {url!r}; it must be {CHAT} or {COMPLETIONS}")
    if not isinstance(body, dict):
        raise RequestError("missing_prompt", "the line has no body object with messages or a prompt")
    asked = _prompt(body) if is_completion(line) else _messages(body)
    return asked, _parameters(body, completion=is_completion(line))


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    if body.get("messages") is None:
        raise RequestError("missing_prompt", "body.messages is missing")
    return conversation(body["messages"])


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if prompt is None or prompt == "" or prompt == []:
        raise RequestError("missing_prompt", "body.prompt is missing or empty")
    if isinstance(prompt, list | int):
        raise RequestError("bad_parameter", "body.prompt must be one string: write one line for each prompt")
    return unicode_text("body.prompt", prompt)


def _parameters(body: Mapping[str, Any], *, completion: bool) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _allowed(name, value)
    passed = {name: value for name, value in given.items() if name in _PASSED}
    if "max_completion_tokens" in given:
        passed["max_tokens"] = given["max_completion_tokens"]
    return passed | _logprobs(given, completion=completion) | _thinking(given) | _form(given.get("response_format"))


def _allowed(name: str, value: Any) -> None:
    if name in _ONLY and value not in _ONLY[name]:
        wanted = " or ".join(repr(v) for v in _ONLY[name])
        raise RequestError("bad_parameter", f"body.{name}: only {wanted} is supported")
    if name not in _ONLY and name not in _PASSED | _HANDLED | _IGNORED:
        raise RequestError("bad_parameter", f"body.{name} is not supported; remove it")


def _logprobs(given: Mapping[str, Any], *, completion: bool) -> dict[str, Any]:
    wanted = given.get("logprobs", False)
    if completion:
        return {} if wanted is False else {"logprobs": wanted}
    if not isinstance(wanted, bool):
        raise RequestError("bad_parameter", "body.logprobs must be true or false; top_logprobs is the number")
    return {"logprobs": given.get("top_logprobs", 0)} if wanted else {}


def _thinking(given: Mapping[str, Any]) -> dict[str, Any]:
    extra = given.get("chat_template_kwargs", {})
    if not isinstance(extra, dict) or set(extra) - {"enable_thinking"}:
        raise RequestError("bad_parameter", "body.chat_template_kwargs: only enable_thinking is supported")
    return {"think": extra["enable_thinking"]} if "enable_thinking" in extra else {}


def _form(form: Any) -> dict[str, Any]:
    """What body.response_format says, as a JSON schema."""
    kind = form.get("type") if isinstance(form, dict) else form
    if form is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"schema": json.dumps({"type": "object"})}
    if kind != "json_schema":
        raise RequestError("bad_parameter", "body.response_format.type must be text, json_object or json_schema")
    named = form.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise RequestError("schema_invalid", "body.response_format.json_schema.schema must be a JSON schema, an object")
    return {"schema": json.dumps(schema)}
