"""What HTTP answers say of an error: OpenAI's object, and SGLang's keys beside it. Used by servers and router. Pure."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256
_TYPES = {404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


def openai_type(status: int) -> str:
    """OpenAI's `type` of errors with this HTTP status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_object(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error answer; `param` names the request field at fault, `code` is a word for machines.

    Messages may quote what the client sent: they are cut.
    """
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}..."
    param = None if param is None else param[:MAX_PARAM_CHARS]
    kind = openai_type(status)
    return {
        "error": {"message": message, "type": kind, "param": param, "code": code},
        "object": "error",
        "message": message,
        "type": kind,
        "param": param,
        "code": status,
    }
