"""Error answers of servers and router: OpenAI's form, with SGLang's keys. Bodies as structs. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.errors import EngineDeadError, PdserveError, RequestError

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256
T = TypeVar("T")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `([^`]*)`$")
_TYPES = {404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


def openai_type(status: int) -> str:
    """Return OpenAI's error `type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


class ErrorBody(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object plus SGLang's keys; SGLang's `code` is the HTTP status."""

    error: ErrorBody
    object: str
    message: str
    type: str
    param: str | None
    code: int


def error_object(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error response; `param` is the invalid request field, `code` a machine-readable code.

    Message and `param` are truncated, because they may quote the request.
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


@dataclasses.dataclass(frozen=True)
class HttpRefusal:
    """The response to a refused request: HTTP status, message, machine-readable code, and headers.

    `param` is the invalid request field; None if the refusal is not about a field.
    """

    status: int
    message: str
    code: str | None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    param: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of the error object."""

    @classmethod
    def of(cls, error: PdserveError) -> HttpRefusal:
        """Return the response to a request that failed with `error`; `Retry-After` is in seconds."""
        if isinstance(error, RequestError):
            after = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
            return cls(error.status, error.message, error.code, after, error.field, error.details)
        if isinstance(error, EngineDeadError):
            return cls(503, f"the engine is not running: {error}", "engine_dead")
        return cls(500, str(error), "internal_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        answer = error_object(self.message, self.status, param=self.param, code=self.code)
        answer["error"] |= self.details
        return answer


def convert(value: Any, kind: type[T], *, prefix: str = "", text_keys: bool = False) -> T:
    """Convert `value` to the msgspec struct `kind`. `text_keys`: numbers that are keys come as text, as in all JSON.

    Raises:
        RequestError: 400 naming the field (as a path, e.g. `sampling_params.top_k`) that is unknown or of a wrong
            type. A field that a whole body lacks is named too; where an inner object lacks one, the object is named.
    """
    try:
        return msgspec.convert(value, kind, str_keys=text_keys)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        inner = path.group(1) if path is not None else ""
        named = _UNKNOWN.search(text) or (None if prefix else _MISSING.search(text))
        names = (prefix, inner, named.group(1) if named is not None else "")
        field = ".".join(name for name in names if name)
        raise RequestError(f"{field}: {_PATH.sub('', text)}", field=field or None) from error
