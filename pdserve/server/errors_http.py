"""Errors as HTTP answers: an OpenAI error object that also carries SGLang's top-level keys.

Used by every endpoint and by the application's exception handlers. Validation errors are 400, never 422: routers retry
a 422 and count it against the worker.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pdserve.base.error_object import error_object
from pdserve.errors import EngineDeadError, PdserveError, RequestError
from pdserve.server.json_http import json_response


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
