"""Answers that the router itself makes: errors in OpenAI's form, and JSON. Called by every file with handlers."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import web

from pdserve.base.error_object import error_object

RETRY_AFTER = {"Retry-After": "1"}


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """An error in OpenAI's form, as servers say theirs; `code` is a word for machines, `param` the field at fault."""
    return orjson.dumps(error_object(message, status, param=param, code=code))


def error_response(
    status: int, message: str, code: str, headers: Mapping[str, str] | None = None, *, param: str | None = None
) -> web.Response:
    """An error that the router itself makes."""
    body = error_body(status, message, code, param)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`value` as JSON."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json", headers=headers)
