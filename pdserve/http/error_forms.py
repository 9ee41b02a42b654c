"""Errors in the form of the API whose path a client calls. Pure; server and router convert their errors with it.

All errors are made in OpenAI's form (`http/errors.py`), also those of middlewares that know no endpoint. The outermost
layer of server and router converts the bodies of error responses on the paths of another API:

    OpenAI's      {"error": {message, type, param, code}, "object", "message", "type", "param", "code"}
    Anthropic's   {"type": "error", "error": {type, message, param, code}, "code": status, "request_id"}
    Ollama's      {"error": message, "param", "error_code", "code": status}

Anthropic's clients read `error.type` and `error.message`, Ollama's `error`. The field, the code, and the HTTP status as
the outer `code` are kept: `inner_error` reads them from all three forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.http.access import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    OLLAMA_CHAT_PATH,
    OLLAMA_GENERATE_PATH,
    OLLAMA_PS_PATH,
    OLLAMA_SHOW_PATH,
    OLLAMA_TAGS_PATH,
    OLLAMA_VERSION_PATH,
)

ANTHROPIC_PATHS = frozenset({MESSAGES_PATH, COUNT_TOKENS_PATH})
OLLAMA_PATHS = frozenset(
    {OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH, OLLAMA_PS_PATH, OLLAMA_SHOW_PATH, OLLAMA_TAGS_PATH, OLLAMA_VERSION_PATH}
)
_BELOW_MESSAGES = f"{MESSAGES_PATH}/"
"""Begin of the paths of Anthropic's API, also of those that are not served, such as `/v1/messages/batches`."""
ANTHROPIC_REQUEST_ID = "request-id"
"""Header in which Anthropic's clients look for the request id."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_converted(path: str) -> bool:
    """Whether the errors at `path` have another form than OpenAI's."""
    return path in ANTHROPIC_PATHS or path in OLLAMA_PATHS or path.startswith(_BELOW_MESSAGES)


def anthropic_type(status: int) -> str:
    """Return Anthropic's error `type` for an HTTP status."""
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 499 else "invalid_request_error")


def anthropic_error(error: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """Convert an error object in OpenAI's form to Anthropic's. `request_id` None: the request has none."""
    status = error["code"]
    inner = {
        "type": anthropic_type(status),
        **{name: value for name, value in error["error"].items() if name != "type"},
    }
    return {"type": "error", "error": inner, "code": status, "request_id": request_id}


def ollama_error(error: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an error object in OpenAI's form to Ollama's."""
    inner = error["error"]
    details = {name: value for name, value in inner.items() if name not in ("message", "type", "param", "code")}
    fields = {"param": inner.get("param"), "error_code": inner.get("code"), "code": error["code"]}
    return {"error": inner.get("message", ""), **details, **fields}


def inner_error(body: Any) -> dict[str, Any]:
    """Return `message`, `param`, `code` and details of an error in any form; empty if `body` has no known form."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return {**body, "message": error, "param": body.get("param"), "code": body.get("error_code")}
    return error if isinstance(error, dict) else {}


def converted_error(path: str, data: bytes, request_id: str | None) -> bytes:
    """Return the body `data` of an error response in the form of the API at `path`.

    A body that is in this form already, or that is no error object in OpenAI's form, is returned unchanged.
    """
    if not is_converted(path):
        return data
    try:
        error = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    is_openai = isinstance(error, dict) and isinstance(error.get("error"), dict) and isinstance(error.get("code"), int)
    if not is_openai or error.get("type") == "error":
        return data
    return orjson.dumps(ollama_error(error) if path in OLLAMA_PATHS else anthropic_error(error, request_id))


def error_event(path: str, error: Mapping[str, Any], request_id: str | None) -> bytes:
    """Return the error event of a stream of the API at `path`. `error`: an object in OpenAI's form."""
    if path in ANTHROPIC_PATHS:
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(error, request_id)) + b"\n\n"
    if path in OLLAMA_PATHS:
        return orjson.dumps(ollama_error(error)) + b"\n"
    return b"data: " + orjson.dumps(error) + b"\n\n"
