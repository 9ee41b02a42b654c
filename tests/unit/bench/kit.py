"""A made-up service for `pdserve bench`, whose writes move the client's clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

Json = dict[str, Any]
Write = tuple[float, bytes]
"""Seconds that pass before a write, and its bytes."""
Answer = Callable[[Json, str], Sequence[Write] | web.Response]
WAIT_S = 20.0


class SteppedClock:
    """A clock for the client. `advance` moves it; `read` waits until the client has read it since then."""

    def __init__(self) -> None:
        self.now = 100.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._read.clear()

    async def read(self) -> None:
        await asyncio.wait_for(self._read.wait(), WAIT_S)


class FakeService:
    """Answers each POST by `answer(body, path)`: writes, or a whole response. Keeps the bodies."""

    def __init__(self, answer: Answer, clock: SteppedClock | None = None) -> None:
        self.answer, self.clock = answer, clock
        self.bodies: list[Json] = []
        self.paths: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.paths.append(request.path)
        found = self.answer(body, request.path)
        if isinstance(found, web.Response):
            return found
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for seconds, data in found:
            if self.clock is not None:
                self.clock.advance(seconds)
            await response.write(data)
            if self.clock is not None:
                await self.clock.read()
        return response


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


@contextlib.asynccontextmanager
async def serving(service: FakeService) -> AsyncIterator[FakeService]:
    app = web.Application()
    app.router.add_get("/v1/models", models)
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        app.router.add_post(path, service.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield service
    finally:
        await runner.cleanup()


def event(body: Json | None) -> bytes:
    """A server-sent event; None: the end."""
    return b"data: " + (b"[DONE]" if body is None else orjson.dumps(body)) + b"\n\n"


def piece(text: str, *, chat: bool = False) -> bytes:
    choice = {"delta": {"content": text}} if chat else {"text": text}
    return event({"choices": [{"index": 0, **choice}], "usage": None})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"choices": [], "usage": found}) + event(None)


def plain(body: Json, path: str) -> list[Write]:
    """As many pieces as asked for, at once, then usage."""
    if path == "/generate":
        num = body["sampling_params"]["max_new_tokens"]
        prompt = len(body["input_ids"]) if "input_ids" in body else len(body["text"].split())
        metas = [{"prompt_tokens": prompt, "completion_tokens": count} for count in range(1, num + 1)]
        events = [event({"text": " w" * (index + 1), "meta_info": meta}) for index, meta in enumerate(metas)]
        return [(0.0, b"".join(events) + event(None))]
    chat = "messages" in body
    num = body.get("max_completion_tokens", body.get("max_tokens"))
    prompt = body["messages"][-1]["content"] if chat else body["prompt"]
    count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return [(0.0, b"".join([*(piece(f" w{index}", chat=chat) for index in range(num)), usage(count, num)]))]
