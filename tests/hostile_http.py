"""Requests that break a rule of HTTP or of ours, as bytes, and what servers and router answer. Sent by their tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

KEPT = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
POST = KEPT + b"Connection: close\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
SMUGGLED = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 1}'
SIZED = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

REFUSED: dict[str, tuple[bytes, int, str | None]] = {
    "many headers": (GET + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(5000)) + b"\r\n", 400, None),
    "one long header": (GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 400, None),
    "headers of 17 KB": (GET + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(17)) + b"\r\n", 400, None),
    "a long path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400, None),
    "two lengths": (KEPT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, 400, None),
    "a chunk of no size": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc", 400, None),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400, None),
    "compressed": (POST + b"Content-Encoding: gzip\r\n" + SIZED, 415, "unsupported_encoding"),
    "plain text": (POST + b"Content-Type: text/plain\r\n" + SIZED, 415, "unsupported_media_type"),
    "a form": (POST + b"Content-Type: multipart/form-data; boundary=x\r\n" + SIZED, 415, "unsupported_media_type"),
    "untyped, of our own page": (POST + b"Origin: http://a\r\n" + SIZED, 415, "unsupported_media_type"),
    "of another page": (POST + b"Origin: http://b\r\nContent-Type: text/plain\r\n" + SIZED, 403, "origin_not_allowed"),
    "of no page": (POST + b"Origin: null\r\n" + SIZED, 403, "origin_not_allowed"),
    "fetched across": (
        POST + b"Sec-Fetch-Site: cross-site\r\nContent-Type: application/json\r\n" + SIZED, 403, "origin_not_allowed"
    ),
    "two million lists": (
        POST + b"Content-Length: 6000015\r\n\r\n" + b'{"prompt": [[' + b"],[" * 2_000_000 + b"]}", 400, None
    ),
}  # fmt: skip
"""By name: bytes, the status that they are answered with, and the error's `code` where the answer is our own."""


async def send(port: int, data: bytes) -> tuple[int, bytes]:
    """Status of the first answer, and all that comes until the server closes, or is silent for a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30.0)
        rest = b""
        try:
            while part := await asyncio.wait_for(reader.read(1 << 16), 1.0):
                rest += part
        except (TimeoutError, ConnectionError):
            pass
    finally:
        writer.close()
    return int(head.split()[1]), head + rest


def error_of(answer: bytes) -> dict[str, Any]:
    """The error object in an answer."""
    found = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert isinstance(found, dict)
    return found
