"""Many HTTP clients at once, some of whom hang up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass
class Outcome:
    """What one client saw. `status` None: the connection broke before an answer."""

    status: int | None = None
    text: str = ""
    finish: str | None = None
    error: str | None = None
    was_cut: bool = False
    """The connection broke: `error` says how, and is no error that the server sent."""
    hung_up: bool = False
    ended_at: float = 0.0


async def _stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for raw in response.content:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if "error" in event:
            outcome.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            outcome.text += choice["delta"].get("content") or ""
            outcome.finish = choice.get("finish_reason") or outcome.finish


async def _client(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], delay_s: float, patience_s: float | None
) -> Outcome:
    outcome = Outcome()

    async def talk() -> None:
        await asyncio.sleep(delay_s)
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = await response.text()
            elif body.get("stream"):
                await _stream(response, outcome)
            else:
                answer = await response.json()
                outcome.text = answer["choices"][0]["message"]["content"]
                outcome.finish = answer["choices"][0]["finish_reason"]

    try:
        await asyncio.wait_for(talk(), None if patience_s is None else delay_s + patience_s)
    except TimeoutError:
        outcome.hung_up = True
    except aiohttp.ClientError as error:
        outcome.error, outcome.was_cut = repr(error), True
    outcome.ended_at = time.monotonic()
    return outcome


async def chat_all(
    url: str, bodies: Sequence[dict[str, Any]], delays_s: Sequence[float], patience_s: Sequence[float | None]
) -> list[Outcome]:
    """Send every body as a chat request after its delay; clients with a patience hang up when it runs out."""
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [
            _client(session, url, body, delay, patience)
            for body, delay, patience in zip(bodies, delays_s, patience_s, strict=True)
        ]
        return await asyncio.gather(*tasks)
