"""Calls to the server that takes requests over: all streams of moved requests are read at once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from pdserve.errors import RequestError
from pdserve.protocol.messages import EngineCoreOutput, FinishReason
from pdserve.server import migration_client
from pdserve.server.migration_client import MigrationClient

MANY = 120
"""More streams than an HTTP client opens by default."""


async def test_many_moved_requests_are_read_at_once() -> None:
    open_streams, all_open = 0, asyncio.Event()
    end = EngineCoreOutput(rid="a", token_ids=[5], finish=FinishReason(type="length"), prompt_tokens=1, cached_tokens=0)

    async def stream(request: web.Request) -> web.StreamResponse:
        nonlocal open_streams
        open_streams += 1
        if open_streams == MANY:
            all_open.set()
        await all_open.wait()
        return web.Response(body=b"data: " + msgspec.json.encode(end) + b"\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/migrate_stream", stream)
    client = MigrationClient("", None)

    async def read(url: URL) -> list[int]:
        return [token async for output in client.outputs(url, "a") for token in output.token_ids]

    async with TestServer(app) as server:
        try:
            async with asyncio.timeout(60):
                found = await asyncio.gather(*(read(server.make_url("/")) for _ in range(MANY)))
        finally:
            all_open.set()
            await client.close()
    assert found == [[5]] * MANY


async def test_a_server_that_hangs_is_found_before_a_request_stops_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_client, "CONNECT_S", 0.05)
    app, gate = web.Application(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await gate.wait()
        return web.Response(status=503)

    app.router.add_get("/health", hang)
    client = MigrationClient("", None)
    async with TestServer(app) as server:
        with pytest.raises(RequestError, match="does not answer") as refused:
            await client.reach(server.make_url("/"))
        assert (refused.value.status, refused.value.code, refused.value.field) == (502, "migration_failed", "to")
        gate.set()
        monkeypatch.setattr(migration_client, "CONNECT_S", 20.0)
        await client.reach(server.make_url("/"))
        await client.close()


async def test_a_server_leads_to_no_other_one() -> None:
    """No proof or key goes to where an answer points."""
    app, asked = web.Application(), list[str]()

    async def away(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    app.router.add_route("*", "/{path:.*}", away)
    client = MigrationClient("", None)
    async with TestServer(app) as server:
        await client.reach(server.make_url("/"))
        await client.close()
    assert asked == ["/health"]
