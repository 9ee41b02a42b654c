"""Responses of the router itself: errors in OpenAI's form, and JSON. Used by every file with handlers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import orjson
from aiohttp import web

from pdserve.http.errors import HttpRefusal, error_object
from pdserve.observe.tracing import CallSpan, Tracing

RETRY_AFTER = {"Retry-After": "1"}


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """Return an error in OpenAI's form, as servers do; `code` is machine-readable, `param` the invalid field."""
    return orjson.dumps(error_object(message, status, param=param, code=code))


def error_response(
    status: int, message: str, code: str, headers: Mapping[str, str] | None = None, *, param: str | None = None
) -> web.Response:
    """Return an error response of the router itself."""
    body = error_body(status, message, code, param)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def refused(refusal: HttpRefusal) -> web.Response:
    """Return the response to a refused request."""
    return json_response(refusal.body, refusal.status, refusal.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with `value` as JSON."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json", headers=headers)


NO_HEADERS: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """Tracing context of a request on its way through the dispatcher."""

    tracing: Tracing
    span: CallSpan

    @contextlib.contextmanager
    def half(self, role: str, url: str) -> Iterator[Mapping[str, str]]:
        """Open a span for a call to a worker; yields headers that make the worker's spans its children.

        The span of decode ends with its first bytes.
        """
        with self.tracing.outgoing(role, self.span) as span:
            span.note(server__address=url)
            yield span.headers


@contextlib.contextmanager
def half_of(trace: CallTrace | None, role: str, url: str) -> Iterator[Mapping[str, str]]:
    """Call `CallTrace.half`; without tracing yield no headers, so that the client's trace headers stay unchanged."""
    if trace is None:
        yield NO_HEADERS
    else:
        with trace.half(role, url) as headers:
            yield headers
