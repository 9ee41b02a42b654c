"""Checks of every HTTP request before its handler runs: framing, content type, and the origin of the web page.

Servers and router each call the checks in one middleware. Pure, except for `BodyBudget`.

CORS prevents a page of another origin from reading responses, and from sending a key or a JSON content type. CORS does
not prevent other requests: a form, an image or a `fetch` of plain text reaches a server on loopback without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdserve.errors import RequestError

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256
_TYPES = {404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


def openai_type(status: int) -> str:
    """Return OpenAI's error `type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


class ErrorBody(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object plus SGLang's keys; SGLang's `code` is the HTTP status."""

    error: ErrorBody
    object: str
    message: str
    type: str
    param: str | None
    code: int


def error_object(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error response; `param` is the invalid request field, `code` a machine-readable code.

    Message and `param` are truncated, because they may quote the request.
    """
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}..."
    param = None if param is None else param[:MAX_PARAM_CHARS]
    kind = openai_type(status)
    return {
        "error": {"message": message, "type": kind, "param": param, "code": code},
        "object": "error",
        "message": message,
        "type": kind,
        "param": param,
        "code": status,
    }


RawHeaders = Sequence[tuple[bytes, bytes]]

OWN_SITE = ("same-origin", "none")
"""`Sec-Fetch-Site` of requests from this server's pages, and of URLs that the user entered."""
MAX_HEADER_BYTES = 16384
"""Limit for names and values of all headers of a request."""
MAX_TARGET_BYTES = 8190
"""Limit for path and query."""
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")
"""Default content types of clients such as `curl -d`, Python's urllib and aiohttp."""
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"content-encoding"})
_FRAMING_SIZES = frozenset(map(len, _FRAMING))
ELSEWHERE = "web pages of this origin are not allowed; add the origin to --cors-allowed-origins"

MAX_VALUES = 1_500_000
"""Limit for values in a JSON body. A value takes up to 100 bytes of memory, and as few as two bytes in the body."""
MAX_CONTAINERS = 1 << 17
TOO_MANY_VALUES = f"the body has more than {MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

LARGE_BODY_BYTES = 1 << 20
"""Smaller bodies are not counted: the number of connections bounds them."""
LARGE_BODIES = 8
"""The budget in bodies of the maximum size."""
BREATH_S = 0.005
BODY_TIMEOUT_S = 120.0
"""Timeout from the headers of a request to the end of its body."""


@dataclasses.dataclass(frozen=True)
class HttpRefusal:
    """The response to a refused request: HTTP status, message, and machine-readable code."""

    status: int
    message: str
    code: str


def framing_refusal(raw: RawHeaders, target_bytes: int) -> HttpRefusal | None:
    """Check a request with headers `raw`, and path and query of `target_bytes`; None if the request is allowed.

    An ambiguous body length lets a proxy and a server parse different requests (request smuggling).
    """
    if target_bytes > MAX_TARGET_BYTES:
        return HttpRefusal(414, f"path and query are longer than {MAX_TARGET_BYTES} bytes", "uri_too_long")
    num_bytes, framing, encodings = 0, set(), []
    for name, value in raw:
        num_bytes += len(name) + len(value)
        if len(name) in _FRAMING_SIZES and (lower := name.lower()) in _FRAMING:
            framing.add(lower)
            if lower == b"content-encoding":
                encodings.append(value.strip().lower())
    if num_bytes > MAX_HEADER_BYTES:
        return HttpRefusal(400, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large")
    if b"content-length" in framing and b"transfer-encoding" in framing:
        return HttpRefusal(400, "a request has Content-Length or Transfer-Encoding, not both", "ambiguous_length")
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        return HttpRefusal(415, "Content-Encoding: compressed bodies are not supported", "unsupported_encoding")
    return None


def page_refusal(
    method: str, headers: Mapping[str, str], allowed: Collection[str], *, command: bool, has_keys: bool
) -> HttpRefusal | None:
    """Check origin and content type of a request; None if the request is allowed.

    Refused: requests of a browser for a page of another origin, and bodies that are not JSON. `allowed` are the CORS
    origins; `command`: an admin path. `has_keys`: the server needs keys, which a page of another origin cannot send
    without permission.
    """
    if (command or method in CHANGING) and not has_keys and from_elsewhere(headers, allowed):
        return HttpRefusal(403, ELSEWHERE, "origin_not_allowed")
    given = headers.get("Content-Type", "")
    if given == "application/json" or method not in CHANGING or not _has_body(headers):
        return None
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    if kind in UNTYPED and not _of_browser(headers):
        return None
    return HttpRefusal(415, f"Content-Type must be application/json, got {kind or 'none'!r}", "unsupported_media_type")


def from_elsewhere(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """True if a page of an origin that is neither this server's nor allowed sent the request.

    Clients other than browsers send none of these headers.
    """
    origin = headers.get("Origin")
    if "*" in allowed or origin in allowed:
        return False
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in OWN_SITE
    return origin is not None and urlsplit(origin).netloc != headers.get("Host")


def _of_browser(headers: Mapping[str, str]) -> bool:
    """Browsers send `Origin` with every POST, and `Sec-Fetch-Site` to trustworthy hosts."""
    return "Origin" in headers or "Sec-Fetch-Site" in headers


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in headers


def has_too_many_values(body: bytes) -> bool:
    """Whether the JSON in `body` has more than `MAX_VALUES` values, or `MAX_CONTAINERS` lists and objects.

    Commas and brackets within strings do not count.
    """
    return _has_too_many(body) and _has_too_many(_STRING.sub(b'""', body))


def _has_too_many(body: bytes) -> bool:
    if len(body) <= MAX_CONTAINERS:
        return False
    containers = body.count(b"[") + body.count(b"{")
    return containers > MAX_CONTAINERS or containers + body.count(b",") > MAX_VALUES


class BodyBudget:
    """Bounds the memory of all request bodies together; `max_bytes` is the limit of one body. Event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._most = LARGE_BODIES * max_bytes
        self._held = 0
        self._turn = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes that large bodies hold now."""
        return self._held

    def open(self) -> BodyHold:
        """Open a hold for the body of one request; close the hold after the response."""
        return BodyHold(self)

    @contextlib.asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Serialize work on large bodies that blocks the event loop, with a pause of `BREATH_S` after each."""
        if num_bytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self._turn:
            yield
            await asyncio.sleep(BREATH_S)

    def take(self, num_bytes: int) -> None:
        """See `BodyHold.add`."""
        if self._held + num_bytes > self._most:
            raise RequestError(
                f"concurrent request bodies would exceed {self._most} bytes; retry later",
                status=503,
                code="too_many_large_bodies",
                retry_after_s=1,
            )
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """See `BodyHold.close`."""
        self._held -= num_bytes


class BodyHold:
    """The share of a `BodyBudget` that the body of one request holds."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = self._taken = 0

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more of the body.

        Raises:
            RequestError: 503, the budget is exhausted.
        """
        self._size += num_bytes
        if self._size > LARGE_BODY_BYTES:
            self._budget.take(self._size - self._taken)
            self._taken = self._size

    def close(self) -> None:
        """Release the bytes of the body."""
        self._budget.give_back(self._taken)
        self._taken = self._size = 0
