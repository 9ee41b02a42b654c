"""Stored responses of this server: what a request to `/v1/responses` continues, and the paths of one response.

A router that has completed a body (`HISTORY_FIELD`) stores its response itself. A server of a pair without such a
router stores nothing, except a decode server that sends the prefill half itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.background_responses import BackgroundResponses
from pdserve.http.credentials import authorization_of
from pdserve.http.response_store import HISTORY_FIELD, PREVIOUS, Recording, ResponseStore
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import (
    PARSED_BODY,
    json_response,
    read_json_object,
    stream_response,
)

RECORDING = "pdserve.recording"
"""Key of an ASGI scope: the `Recording` of the request's response; absent: nothing is stored."""
Handle = Callable[[Request], Awaitable[Response]]


def with_history(context: ServerContext, handle: Handle, *, pairs: bool) -> Handle:
    """Return a handler of `/v1/responses` that gives `handle` bodies with their conversation.

    `pairs`: this decode server sends the prefill half itself.
    """

    async def answer(request: Request) -> Response:
        body = await read_json_object(request, context.max_body_bytes)
        request.scope[PARSED_BODY] = body
        if HISTORY_FIELD in body:
            return await handle(request)
        if context.mode == "null" or (pairs and body.get("bootstrap_room") is None):
            body, recording = _store(context).begin(body, _owner(context, request))
            request.scope[RECORDING] = recording
        elif body.get(PREVIOUS) is not None:
            message = f"{PREVIOUS}: a {context.mode} server stores no responses; send requests through pdserve's router"
            raise RequestError(message, field=PREVIOUS, code="unsupported")
        else:
            body = {**body, "store": False} if body.get("store") is True else body
        request.scope[PARSED_BODY] = body
        return await handle(request)

    return answer


def recording_of(request: Request) -> Recording | None:
    """Return what stores the response of `request`; None: nothing does."""
    found: Recording | None = request.scope.get(RECORDING)
    return found


async def get_response(context: ServerContext, request: Request) -> Response:
    """Serve `GET /v1/responses/ID`. Raises RequestError: see `ResponseStore.get` and `events`."""
    events = _store(context).events(*_named(context, request), request.query_params)
    if events is None:
        return json_response(_store(context).get(*_named(context, request)))
    return await stream_response(request, events, done=b"")


async def delete_response(context: ServerContext, request: Request) -> Response:
    """Serve `DELETE /v1/responses/ID`. Raises RequestError: see `BackgroundResponses.delete`."""
    return json_response(background_of(context).delete(*_named(context, request)))


async def cancel_response(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/responses/ID/cancel`. Raises RequestError: see `BackgroundResponses.cancel`."""
    return json_response(background_of(context).cancel(*_named(context, request)))


async def response_items(context: ServerContext, request: Request) -> Response:
    """Serve `GET /v1/responses/ID/input_items`. Raises RequestError: see `ResponseStore.input_items`."""
    return json_response(_store(context).input_items(*_named(context, request), request.query_params))


def background_of(context: ServerContext) -> BackgroundResponses:
    """Return the responses that run in the background at this server."""
    assert context.background is not None, "an application has a store"
    return context.background


def _named(context: ServerContext, request: Request) -> tuple[Any, str]:
    return request.path_params["response_id"], _owner(context, request)


def _owner(context: ServerContext, request: Request) -> str:
    """Return the valid API key of a request; empty on a server without keys."""
    return context.config.access.keys.find(authorization_of(request.headers)) or ""


def _store(context: ServerContext) -> ResponseStore:
    assert context.responses is not None, "an application has a store"
    return context.responses
