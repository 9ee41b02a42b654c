"""Answers that fake workers give."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


async def ok(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A JSON answer that names the worker."""
    return web.json_response({"from": worker.name}, headers={"X-Worker": worker.name})


async def silent(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """None."""
    await asyncio.Event().wait()
    raise AssertionError("never")


async def begin_stream(request: web.Request) -> web.StreamResponse:
    """A stream of events whose head is sent; events are written to it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response
