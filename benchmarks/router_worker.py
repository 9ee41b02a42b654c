"""A worker that does nothing, at any speed: what `bench_router` puts behind routers, and the client it asks them with.

    python -m benchmarks.router_worker      prints its port, serves until it is killed

`POST` is answered at once: with one JSON object, or, where the body says `"stream":true`, with as many events as its
`"max_tokens"`. Everything else gets the small facts that routers look for. Plain asyncio, no HTTP library: the
client and the workers must cost less than what is measured between them.
"""

from __future__ import annotations

import asyncio
import re

import uvloop

EVENT = b'data: {"text":"hello","meta_info":{"id":"r","finish_reason":null,"completion_tokens":7}}\n\n'
WHOLE = b'{"text":"hello","output_ids":[1,2,3],"meta_info":{"id":"r","finish_reason":{"type":"length"}}}'
FACTS = b'{"served_model_name":"m","model_path":"m","tp_size":1,"dp_size":1,"disaggregation_bootstrap_port":1}'
LOADS = b'[{"dp_rank":0,"num_reqs":1,"num_tokens":10}]'
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
NUM_EVENTS = re.compile(rb'"max_tokens": *(\d+)')
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def plain(body: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, until it closes."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length.group(1))) if length else b""
            await answer(head, body, writer)
    except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # uvloop: a write after the peer hung up
        writer.close()


async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    """One answer; a stream's events are written one by one, as a worker's are."""
    if not head.startswith(b"POST"):
        writer.write(plain(LOADS if b"load" in head.split(b"\r\n", 1)[0] else FACTS))
    elif b'"stream":true' not in body:
        writer.write(plain(WHOLE))
    else:
        count = NUM_EVENTS.search(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(int(count.group(1)) if count else 1):
            writer.write(chunk(EVENT))
            await asyncio.sleep(0)
        writer.write(chunk(b"data: [DONE]\n\n") + END)
    await writer.drain()


class Client:
    """One connection that asks again and again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Client:
        """Connect to a router or worker on this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def ask(self, request: bytes) -> None:
        """Send a whole request and read its answer to the end; `AssertionError` unless it is a 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        body = await self._reader.readexactly(int(length.group(1))) if length else await self._reader.readuntil(END)
        assert head.startswith(b"HTTP/1.1 200"), head + body

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


async def main() -> None:
    """Serve for ever."""
    server = await asyncio.start_server(serve_one, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
