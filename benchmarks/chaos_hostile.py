"""What `benchmarks.chaos` sends that no honest client would: each must be refused in good time and change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.chaos_farm import Farm, Member
from benchmarks.chaos_load import CHAT, COMPLETIONS, GENERATE, HUNG, WRONG, Ending
from pdserve.base.proof import PROOF_HEADER

REFUSED, UNREACHABLE = "refused", "unreachable"
JSON = {"Content-Type": "application/json"}
FOREIGN = {"Content-Type": "text/plain", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
PAUSE_S = (0.2, 1.5)
VISIT_S = 40.0
"""Seconds after which the trap closes a connection."""
TAKEN = 200


@dataclasses.dataclass(frozen=True)
class Hostile:
    """One request: to the router, or with `worker` to a server of that mode."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str]
    worker: str | None = None
    raw: bytes | None = None
    """Sent as it is instead, without an HTTP client."""


def make_hostile(model: str, trap_port: int, trap_host: str, scale: int) -> list[Hostile]:
    """One of each kind; `scale` is the number of repeats in regular expressions."""

    def of(name: str, path: str, fields: dict[str, Any], worker: str | None = None) -> Hostile:
        return Hostile(name, path, json.dumps(fields).encode(), JSON, worker)

    prompt = {"model": model, "prompt": "hi", "max_tokens": 2, "temperature": 0}
    bomb = f"(?:ab?c*){{{scale}}}x"
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(7000)}}
    users = [{"role": "user", "content": "x"}] * 50_000
    ids = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    lured = {**ids, "bootstrap_host": trap_host, "bootstrap_port": trap_port, "bootstrap_room": 1 << 40}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    both_lengths = head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    long_header = b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"
    listed = [
        of("stop_regex bomb", COMPLETIONS, {**prompt, "stop_regex": [bomb]}),
        of("regex bomb", COMPLETIONS, {**prompt, "regex": bomb}),
        of("schema of 7,000 properties", COMPLETIONS, {**prompt, "json_schema": wide}),
        of("prompt of 1 MB", COMPLETIONS, {**prompt, "prompt": "a b " * 250_000}),
        of("50,000 messages", CHAT, {"model": model, "messages": users, "max_tokens": 1}),
        of("n of 10^9", COMPLETIONS, {**prompt, "n": 10**9}),
        of("100,000 stops", COMPLETIONS, {**prompt, "stop": [f"x{i}" for i in range(100_000)]}),
        of("lured look-up", GENERATE, lured, "decode"),
        of("host of probes", GENERATE, {**lured, "bootstrap_host": "2.2.2.2"}, "decode"),
        Hostile("nested brackets", COMPLETIONS, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON),
        Hostile("infinite bias", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"logit_bias":{"1":1e999}}', JSON),
        Hostile("no UTF-8", COMPLETIONS, b'{"prompt":"\xff\xfe\x80","max_tokens":1}', JSON),
        Hostile("another site's page", COMPLETIONS, json.dumps(prompt).encode(), FOREIGN),
        Hostile("another site's page at a server", "/tokenize", b'{"prompt":"a"}', FOREIGN, "decode"),
        Hostile("gzip that is none", COMPLETIONS, b"abcd", {**JSON, "Content-Encoding": "gzip"}),
    ]
    for worker in (None, "prefill", "decode"):
        listed.append(Hostile("header of 70 KB", "", b"", {}, worker, long_header))
        listed.append(Hostile("two lengths", "", b"", {}, worker, both_lengths))
    return listed


class Trap:
    """A server that clients name as a bootstrap server: it answers one byte a second, and notes what it is told.

    `num_secrets` counts the visits that sent the control token, or a proof of it.
    """

    def __init__(self, secret: str) -> None:
        self._secrets = [PROOF_HEADER.lower().encode(), *([secret.lower().encode()] if secret else [])]
        self.num_visits = 0
        self.num_secrets = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_visits += 1
        received, has_told = b"", False
        dripping: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(VISIT_S):
                while chunk := await reader.read(65536):
                    received += chunk.lower()
                    dripping = dripping or asyncio.create_task(_drip(writer))
                    if not has_told and any(secret in received for secret in self._secrets):
                        has_told = True
                        self.num_secrets += 1
        except (OSError, TimeoutError):
            pass
        finally:
            if dripping is not None:
                dripping.cancel()
            writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """Send an answer of one byte a second, which does not end, until the client closes the connection."""
    with contextlib.suppress(OSError):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(1)


class Attackers:
    """Clients that send hostile requests, one after the other, until they are told to stop."""

    def __init__(self, farm: Farm, hostile: Sequence[Hostile], seed: int, deadline_s: float) -> None:
        self._farm, self._hostile, self._deadline_s = farm, hostile, deadline_s
        self._rng = random.Random(seed)
        self.endings: list[Ending] = []
        self.stopping = False

    async def run(self, num_clients: int) -> None:
        """Send until `stopping`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            await asyncio.gather(*(self._client(session) for _ in range(num_clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self.stopping:
            hostile = self._rng.choice(self._hostile)
            self.endings.append(await self.send(session, hostile, self._target(hostile)))
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))

    def _target(self, hostile: Hostile) -> Member:
        if hostile.worker is None:
            return self._farm.router
        return self._rng.choice(self._farm.prefill if hostile.worker == "prefill" else self._farm.decode)

    async def send(self, session: aiohttp.ClientSession, hostile: Hostile, member: Member) -> Ending:
        """One hostile request to `member`, and whether it was refused as it must be."""
        began, where = time.monotonic(), member.mode
        try:
            async with asyncio.timeout(self._deadline_s):
                status, text = await self._exchange(session, hostile, member)
            verdict, detail = self._judge(status, text)
        except TimeoutError:
            verdict, detail = HUNG, f"no answer within {self._deadline_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            verdict, detail = UNREACHABLE, repr(error)
        return Ending(hostile.name, where, verdict, began, time.monotonic(), detail)

    async def _exchange(self, session: aiohttp.ClientSession, hostile: Hostile, member: Member) -> tuple[int, str]:
        if hostile.raw is not None:
            host, port = member.address, member.port
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(hostile.raw)
                await writer.drain()
                line = await reader.readline()
                return (int(line.split()[1]), line.decode()) if line else (400, "closed")
            finally:
                writer.close()
        url = member.url + hostile.path
        async with session.post(url, data=hostile.body, headers=hostile.headers) as response:
            return response.status, await response.text()

    def _judge(self, status: int, text: str) -> tuple[str, str]:
        if status == TAKEN:
            return WRONG, f"it was taken: {text[:120]}"
        if status == 500:
            return WRONG, f"500: {text[:120]}"
        return REFUSED, f"{status}"
