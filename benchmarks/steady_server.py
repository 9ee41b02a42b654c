"""A service of `/v1/completions` that keeps a timetable: what a benchmark client measures there is known beforehand.

`compare_bench --servers steady` compares benchmark clients with it. A real server answers no two runs alike, so the
figures of two clients differ there by more than their definitions do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web

FIRST_S = tuple(0.10 + 0.02 * step for step in range(8))
"""Seconds to the first token of requests that follow each other."""
GAPS_S = (0.015, 0.020, 0.025, 0.030)
"""Seconds between tokens; the next one after each `len(FIRST_S)` requests."""
PAUSE_S = 0.15
"""The gap before the middle token."""
READY_S = 10.0


def timetable(index: int, output_len: int) -> list[float]:
    """Return seconds from a request's arrival to each of its tokens. `index` counts the requests of the service.

    Any `len(FIRST_S) * len(GAPS_S)` requests in a row have the same timetables, wherever they begin.
    """
    first = FIRST_S[index % len(FIRST_S)]
    gap = GAPS_S[index // len(FIRST_S) % len(GAPS_S)]
    gaps = [PAUSE_S if at == output_len // 2 else gap for at in range(1, output_len)]
    return list(itertools.accumulate(gaps, initial=first))


class SteadyService:
    """Answers with `max_tokens` events of one word each, at the times of its `timetable`."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._indexes = itertools.count()

    def app(self) -> web.Application:
        """Return the application with its two endpoints."""
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`, streamed. The prompt counts as many tokens as it has words."""
        began = asyncio.get_running_loop().time()
        times_s = timetable(next(self._indexes), int((body := await request.json()).get("max_tokens", 16)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, seconds in enumerate(times_s, 1):
            await asyncio.sleep(began + seconds - asyncio.get_running_loop().time())
            choice = {"index": 0, "text": " word", "finish_reason": "length" if at == len(times_s) else None}
            await self._send(response, {"choices": [choice]})
        prompt = len(str(body.get("prompt", "")).split())
        usage = {
            "prompt_tokens": prompt, "completion_tokens": len(times_s), "total_tokens": prompt + len(times_s),
        }  # fmt: skip
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        whole = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": self.model} | event
        await response.write(b"data: " + json.dumps(whole).encode() + b"\n\n")


@contextlib.contextmanager
def steady_server(model: str) -> Iterator[str]:
    """Serve on a free port of loopback, in a thread with an event loop of its own. Yields the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="steady", daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(SteadyService(model).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(READY_S)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(READY_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(READY_S)
        loop.close()
