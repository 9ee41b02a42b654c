"""Answers of fake workers that are streams of events."""

from __future__ import annotations

from aiohttp import web


async def begin_stream(request: web.Request) -> web.StreamResponse:
    """A stream of events whose head is sent; events are written to it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response
