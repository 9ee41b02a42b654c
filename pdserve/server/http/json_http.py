"""JSON bodies in and out: bounded reading, precise refusals, fast writing. Used by every endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pdserve.base.http_rules import TOO_MANY_VALUES, BodyBudget, error_object, has_too_many_values
from pdserve.errors import EngineDeadError, PdserveError, RequestError


def describe(error: PdserveError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error of ours."""
    if isinstance(error, RequestError):
        return error.status, error_object(error.message, error.status, param=error.field, code=error.code)
    if isinstance(error, EngineDeadError):
        return 503, error_object(f"the engine is not running: {error}", 503, code="engine_dead")
    return 500, error_object(str(error), 500, code="internal_error")


def error_response(error: PdserveError) -> Response:
    """The answer to a request that failed before its first byte; says when to come back where that is known."""
    status, body = describe(error)
    retry_after_s = error.retry_after_s if isinstance(error, RequestError) else None
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return json_response(body, status=status, headers=headers)


def error_event(error: PdserveError) -> bytes:
    """The last event but one of a stream that failed after its first byte."""
    return b"data: " + orjson.dumps(describe(error)[1]) + b"\n\n"


async def _on_pdserve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return error_response(error)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_object(str(error.detail), error.status_code)
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))


async def _on_bug(_: Request, error: Exception) -> Response:
    return json_response(
        error_object(f"internal error: {type(error).__name__}", 500, code="internal_error"), status=500
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in this form."""
    app.add_exception_handler(PdserveError, _on_pdserve_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


T = TypeVar("T")

SHALLOW = 200
"""A body with so few brackets cannot be too deep."""
BODIES = "pdserve.bodies"
"""Where a request's scope has the `BodyBudget` of its application; put there by `access`."""
EXPLAINED_BYTES = 1 << 20
"""In larger ones `NaN` is not looked for: Python's own parser takes many times as long."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as a JSON answer."""
    data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(data, status_code=status, headers=headers, media_type="application/json")


async def read_body(request: Request, max_bytes: int) -> list[bytes]:
    """The whole body, in parts.

    Raises:
        RequestError: 413 as soon as it is known to be larger than `max_bytes`.
    """
    too_large = RequestError(
        f"request body is larger than {max_bytes} bytes (--max-request-bytes)", status=413, code="request_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return parts


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. `NaN` and `Infinity` are let through, so that the check of the field can name it.

    Raises:
        RequestError: 400 for malformed JSON or another type than an object, 413 when too large.
    """
    parts = await read_body(request, max_bytes)
    bodies: BodyBudget = request.scope[BODIES]
    async with bodies.turn(sum(map(len, parts))):
        data = b"".join(parts)
        await asyncio.sleep(0)
        if has_too_many_values(data):
            raise RequestError(TOO_MANY_VALUES, code="invalid_json")
        await asyncio.sleep(0)
        value = _parse(data)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def _parse(data: bytes) -> Any:
    try:
        value = orjson.loads(data)
        if data.count(b"[") + data.count(b"{") > SHALLOW:
            orjson.dumps(value)  # refuses what is nested deeper than 254 levels, as anyone would who wrote it again
        return value
    except orjson.JSONEncodeError as error:
        del value  # the traceback keeps this frame
        raise RequestError("the body is nested too deeply", code="invalid_json") from error
    except orjson.JSONDecodeError as error:
        malformed = RequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    if len(data) > EXPLAINED_BYTES:
        raise malformed
    try:
        value = json.loads(data)
        orjson.dumps(value)  # refuses lone surrogates, which no tokenizer or socket takes
    except (ValueError, RecursionError, TypeError) as error:
        raise malformed from error
    return value


def convert(value: Any, kind: type[T], *, prefix: str = "") -> T:
    """`value` as the msgspec struct `kind`.

    Raises:
        RequestError: 400 naming the field (as a path, e.g. `sampling_params.top_k`) that has the wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        inner = path.group(1) if path is not None else ""
        unknown = _UNKNOWN.search(text)
        names = (prefix, inner, unknown.group(1) if unknown is not None else "")
        field = ".".join(name for name in names if name)
        raise RequestError(f"{field}: {_PATH.sub('', text)}", field=field or None) from error


def refuse_unsupported(body: dict[str, Any], names: Iterable[str], *, prefix: str = "") -> dict[str, Any]:
    """`body` without the fields `names`, which pdserve does not honour.

    Raises:
        RequestError: 400 naming the field, when one of them asks for something (is not null, false, 0 or empty).
    """
    refused = set(names)
    for name in sorted(refused & body.keys()):
        if body[name]:
            field = f"{prefix}.{name}" if prefix else name
            raise RequestError(f"{field} is not supported by this server", field=field, code="unsupported")
    return {name: value for name, value in body.items() if name not in refused}


def scalar_or_list(value: Any, count: int, field: str, kinds: type | tuple[type, ...]) -> list[Any]:
    """A field that may be given once for all prompts, or as a list with one entry for each.

    Raises:
        RequestError: 400 naming `field`, for a wrong type or a list of another length than `count`.
    """
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{field} has {len(values)} entries for {count} prompts", field=field)
    for entry in values:
        wrong_bool = isinstance(entry, bool) and kinds is not bool
        if entry is not None and (wrong_bool or not isinstance(entry, kinds)):
            raise RequestError(f"{field} has the wrong type: {type(entry).__name__}", field=field)
    return values
