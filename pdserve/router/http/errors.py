"""Answers that the router itself makes: errors in OpenAI's form, and JSON. Called by every file with handlers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import orjson
from aiohttp import web

from pdserve.base.http_rules import error_object
from pdserve.observe.tracing import CallSpan, Tracing

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


NO_HEADERS: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """What a traced call takes along through the dispatcher."""

    tracing: Tracing
    span: CallSpan

    @contextlib.contextmanager
    def half(self, role: str, url: str) -> Iterator[Mapping[str, str]]:
        """A call to a worker; the headers that make the worker's spans its children. Ends with decode's first bytes."""
        with self.tracing.outgoing(role, self.span) as span:
            span.note(server__address=url)
            yield span.headers


@contextlib.contextmanager
def half_of(trace: CallTrace | None, role: str, url: str) -> Iterator[Mapping[str, str]]:
    """See `CallTrace.half`; nothing where nobody traces, and then the client's own headers go on as they came."""
    if trace is None:
        yield NO_HEADERS
    else:
        with trace.half(role, url) as headers:
            yield headers
