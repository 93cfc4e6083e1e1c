"""Every error in OpenAI's shape, with the HTTP status that tells whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minicpm_cli.errors import ContextOverflow, MinicpmError, OutOfMemory, RequestError, TemplateError, UsageError
from minicpm_cli.server.loop import Busy

_OVERFLOW = "context_overflow"
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What an error is to a client. `code` and `param` are OpenAI's, where it has one."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        message = self.message.encode("utf-8", "replace").decode()  # half a surrogate pair is no JSON
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class Refused(Exception):
    """A call that ends with this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

    def __reduce__(self) -> tuple[type[Refused], tuple[Fault]]:
        return Refused, (self.fault,)


def refused(status: int, message: str, code: str | None = None, param: str | None = None) -> Refused:
    return Refused(Fault(status, message, code, param))


def fault_of(error: Exception | None) -> Fault:
    """What befell a request; a defect of ours is not explained to the client."""
    if isinstance(error, Refused):
        return error.fault
    if isinstance(error, Busy):
        return Fault(429, str(error), "queue_full", headers={"Retry-After": str(error.seconds)})
    if isinstance(error, OutOfMemory):
        return Fault(503, str(error), "out_of_memory", headers={"Retry-After": "1"})
    if isinstance(error, ContextOverflow) or (isinstance(error, RequestError) and error.code == _OVERFLOW):
        return Fault(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, UsageError | TemplateError):  # a template refuses what it was not made for
        return Fault(400, str(error), error.code if isinstance(error, RequestError) else None)
    if isinstance(error, MinicpmError):
        return Fault(500, str(error))
    return Fault(500, "The server failed on this request; its log says why.", "internal_error")


STOPPING = Fault(503, "The server is stopping. Ask another one.", "stopping", headers={"Retry-After": "10"})
FAILED = Fault(503, "The engine has failed and takes no more requests; the server has to be started again.", "failed")


def invalid(errors: list[Any]) -> Fault:
    """What pydantic found, in one sentence that names the field."""
    if not errors:
        return Fault(400, "the request is invalid")
    worst = max(errors, key=_weight)
    param = _place(worst.get("loc", ()))
    if worst.get("type") == "extra_forbidden":
        return Fault(400, f"Unrecognized request argument supplied: {param}", "unknown_parameter", param)
    if worst.get("type") == "json_invalid":
        what = worst.get("ctx", {}).get("error", "")
        return Fault(400, f"the body is not valid JSON: {what}", "invalid_json")
    if not param:
        return Fault(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
    missing = worst.get("type") == "missing"
    message = f"{param} is missing" if missing else f"{param}: {_lower(str(worst.get('msg', 'invalid')))}"
    return Fault(400, message, "missing_parameter" if missing else "invalid_value", param)


def _weight(error: Any) -> tuple[bool, int, bool]:
    """The innermost says most; and of two kinds that a value may be, not the one that it is none of."""
    kind = str(error.get("type"))
    return kind == "extra_forbidden", len(error.get("loc", ())), not kind.endswith("_type")


def _place(loc: tuple[Any, ...]) -> str:
    """messages[2].content, of a path that begins with where the value came from."""
    steps = [step for step in loc[1:] if not (isinstance(step, str) and _is_branch(step))]
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return written.removeprefix(".")


def _is_branch(step: str) -> bool:
    """Which alternative of a type was tried: no field's name."""
    return step in ("str", "int", "float", "bool") or "[" in step


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
