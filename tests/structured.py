"""What structured output is asked for in tests, and how it came."""

from __future__ import annotations

from minicpm_cli.llm.llm import LLM
from minicpm_cli.types import Event, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["ok", "size", "names"],
    "additionalProperties": False,
}


def answered(llm: LLM, requests: list[Request]) -> dict[str, tuple[str, Event]]:
    """The answer's text and the last event of each request."""
    said: dict[str, str] = {request.id: "" for request in requests}
    last = {}
    for event in llm.stream(requests):
        said[event.id] += event.text if event.channel == "answer" else ""
        last[event.id] = event
    return {name: (said[name], last[name]) for name in said}
