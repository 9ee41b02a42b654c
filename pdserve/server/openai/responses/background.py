"""`POST /v1/responses` with `background`: the same endpoint, called without its client.

    in_background ── checked, in the store ──> the response object, or its events, for the client
                  └─ task ──> the endpoint, with a body that streams ──> ResponseStore.feed

Only where responses are stored: see `stored`.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message

from pdserve.http.background_responses import Take, is_background, worker_body
from pdserve.server.context import ServerContext
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.http.json_http import (
    CLIENT_SLOT,
    PARSED_BODY,
    EventStream,
    json_response,
    read_json_object,
    stream_response,
)
from pdserve.server.openai.responses.endpoint import prepare_response
from pdserve.server.openai.responses.stored import RECORDING, Handle, background_of


def in_background(context: ServerContext, handle: Handle, drain_gate: DrainGate) -> Handle:
    """Return a handler of `/v1/responses` that runs bodies with `background` in a task, and passes others to `handle`.

    The request must have passed `stored.with_history`. A response in the background keeps the server from draining, and
    its client's slot. A monolith refuses an invalid body at once; on a decode server the response fails.
    """

    async def answer(request: Request) -> Response:
        body = await read_json_object(request, context.max_body_bytes)
        if not is_background(body) or RECORDING not in request.scope:
            return await handle(request)
        runs = background_of(context)
        whole = worker_body(body)
        if context.mode == "null":  # `SingleRequests` of a decode server has no room for it yet
            await prepare_response(context, whole)
        running = runs.begin(body, request.scope[RECORDING])
        inner = Request({**request.scope, PARSED_BODY: whole, RECORDING: None}, _stays)

        async def read(take: Take) -> None:
            response = await handle(inner)
            assert isinstance(response, EventStream), "the body streams"
            async for event in response.events():
                take(event)

        held: contextlib.ExitStack = request.scope[CLIENT_SLOT].pop_all()
        held.enter_context(drain_gate.call())
        runs.start(running, read, held)
        if running.events is None:
            return json_response(running.response)
        return await stream_response(request, running.events.read(-1), done=b"")

    return answer


async def _stays() -> Message:
    """Receive nothing: the task has no client that could disconnect."""
    await asyncio.Event().wait()
    raise AssertionError("never")
