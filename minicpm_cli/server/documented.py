"""The answers beside the usual ones that our OpenAPI document names for a path."""

from __future__ import annotations

from typing import Any

from minicpm_cli.server.schema import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong."},
    401: {"model": ErrorBody, "description": "The key is missing or wrong."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come again."},
    503: {"model": ErrorBody, "description": "The server is stopping, or its engine has failed."},
}
NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "There is no such model."}}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer, or its pieces."}
}
