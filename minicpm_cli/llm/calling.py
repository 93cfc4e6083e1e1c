"""What a request with tools asks of the prompt, of the tokens and of the text that comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minicpm_cli.errors import RequestError
from minicpm_cli.text.template import ChatTemplate
from minicpm_cli.text.tool_blocks import Forced
from minicpm_cli.text.tool_calls import ToolCallStream
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.types import Request, SamplingParams, Tool, ToolChoice

_ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools that an answer may call, in the model's own way.

    `forced` has no beginning where it need not, and no rules where calls are not held to the tools' schemas; with
    `one`, a single call is the answer.
    """

    how: ToolFormat
    tools: tuple[Tool, ...]
    forced: Forced = field(default_factory=Forced)
    one: bool = False

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """For an answer that the prompt began it is too late to think."""
        return replace(params, schema=self.forced.schema, think=False) if self.forced.begun else params

    def stream(self, request_id: str, seed: int) -> ToolCallStream:
        """Ids of calls follow from the request and its seed, so that a row that runs again is the same row."""

        def identify(index: int) -> str:
            digest = hashlib.sha256(f"{request_id}\0{seed}\0{index}".encode("utf-8", "replace")).hexdigest()
            return f"call_{digest[:_ID_DIGITS]}"

        return ToolCallStream(self.how, self.tools, identify, self.forced, one=self.one)


def calling(request: Request, template: ChatTemplate | None) -> Calling | None:
    """None where nothing may be called. Raises RequestError(bad_parameter) where the model can be given no tools."""
    _check_history(request, template)
    if not request.tools or request.tool_choice.mode == "none":
        return None
    if isinstance(request.messages, str) or template is None:
        raise RequestError("bad_parameter", "tools: a raw prompt has no place for them; send messages")
    how = template.tool_format
    if how is None:
        raise RequestError(
            "bad_parameter",
            f"tools: this model's chat template ({template.origin}) takes no tools, or writes calls in a way that is "
            "not known here; leave tools out, or try --chat-template chatml, which lends it a way",
        )
    for tool in request.tools:
        if (why := how.refuses(tool)) is not None:
            raise RequestError("bad_parameter", f"tools: {why}")
    return Calling(how, request.tools, _forced(request, how), one=_one(request.tool_choice))


def _one(choice: ToolChoice) -> bool:
    return choice.name is not None or not choice.parallel


def _check_history(request: Request, template: ChatTemplate | None) -> None:
    calls = any(turn.tool_calls for turn in request.messages if not isinstance(turn, str))
    if calls and template is not None and "tool_calls" not in template.source:
        raise RequestError(
            "bad_parameter", f"tool_calls: this model's chat template ({template.origin}) knows none; leave them out"
        )


def _forced(request: Request, how: ToolFormat) -> Forced:
    choice = request.tool_choice
    if choice.mode != "required":
        return Forced(rules=_held(request, how))
    taken = {"a schema": request.params.schema, "a regex": request.params.regex, "a prefill": request.prefill or None}
    for name, value in taken.items():
        if value is not None:
            raise RequestError("bad_parameter", f"tool_choice: an answer that must call has no place for {name}")
    return how.forced(_offered(request.tools, choice.name))


def _held(request: Request, how: ToolFormat) -> str | None:
    """The rules of calls that need not be made, where all tools are `strict` as OpenAI has it."""
    free = request.params.schema is None and request.params.regex is None
    strict = all(tool.definition["function"].get("strict") is True for tool in request.tools)
    return how.held(request.tools) if free and strict else None


def _offered(tools: Sequence[Tool], name: str | None) -> Sequence[Tool]:
    return [tool for tool in tools if name in (None, tool.name)]
