"""What holds for every HTTP request before a handler sees it: its framing, its type, and the page that it comes from.

Used by the HTTP sides of servers and router, each of which checks it in one middleware. Pure, but for `BodyBudget`.

CORS keeps a web page of another origin from reading answers, and from asking with a key or with JSON that says that it
is JSON. It does not keep it from asking: a form, an image or a `fetch` of plain text is enough for a server on loopback
that wants no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import RequestError

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256
_TYPES = {404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


def openai_type(status: int) -> str:
    """OpenAI's `type` of errors with this HTTP status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_object(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error answer; `param` names the request field at fault, `code` is a word for machines.

    Messages may quote what the client sent: they are cut.
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
"""`Sec-Fetch-Site` of our own pages, and of what a person has typed in."""
MAX_HEADER_BYTES = 16384
"""Names and values of all headers of a request."""
MAX_TARGET_BYTES = 8190
"""Path and query."""
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")
"""What programs say of a body whose type they were not told: `curl -d`, Python's urllib, aiohttp."""
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
ELSEWHERE = "web pages of other origins may not do this; --cors-allowed-origins names those that may"

MAX_VALUES = 1_500_000
"""Values in the JSON of a body. Each takes up to a hundred bytes of memory, and may take two in the body."""
MAX_CONTAINERS = 1 << 17
TOO_MANY_VALUES = f"the body has more than {MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

LARGE_BODY_BYTES = 1 << 20
"""Smaller bodies are not counted: connections bound them."""
LARGE_BODIES = 8
"""So many bodies of the largest size may be held at a time."""
BREATH_S = 0.005
BODY_TIMEOUT_S = 120.0
"""From the headers of a request to the end of its body."""


@dataclasses.dataclass(frozen=True)
class HttpRefusal:
    """The answer to a request that breaks a rule: HTTP status, words for people, a word for machines."""

    status: int
    message: str
    code: str


def framing_refusal(raw: RawHeaders, target_bytes: int) -> HttpRefusal | None:
    """Why a request is refused whose headers are `raw`, with path and query of `target_bytes`.

    What is wrong with the length of its body makes proxies and servers see different requests in the same bytes.
    """
    if target_bytes > MAX_TARGET_BYTES:
        return HttpRefusal(414, f"path and query are longer than {MAX_TARGET_BYTES} bytes", "uri_too_long")
    if sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
        return HttpRefusal(400, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large")
    names = [name.lower() for name, _ in raw]
    if b"content-length" in names and b"transfer-encoding" in names:
        return HttpRefusal(400, "a request has Content-Length or Transfer-Encoding, not both", "ambiguous_length")
    encodings = [value.strip().lower() for name, value in raw if name.lower() == b"content-encoding"]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        return HttpRefusal(
            415, "Content-Encoding: bodies are taken as they are, not compressed", "unsupported_encoding"
        )
    return None


def page_refusal(
    method: str, headers: Mapping[str, str], allowed: Collection[str], *, command: bool, has_keys: bool
) -> HttpRefusal | None:
    """Why a request is refused that a browser may have sent for a page of another origin, or whose body is no JSON.

    `allowed` are the origins that may ask, `command` says that the path changes things for others, `has_keys` that
    keys are asked for, which a page of another origin cannot send unasked.
    """
    if (command or method in CHANGING) and not has_keys and from_elsewhere(headers, allowed):
        return HttpRefusal(403, ELSEWHERE, "origin_not_allowed")
    if method not in CHANGING or not _has_body(headers):
        return None
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    if kind in UNTYPED and not _of_browser(headers):
        return None
    return HttpRefusal(415, f"Content-Type must be application/json, got {kind or 'none'!r}", "unsupported_media_type")


def from_elsewhere(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """True for requests of pages whose origin is neither ours nor allowed; programs send none of these headers."""
    origin = headers.get("Origin")
    if "*" in allowed or origin in allowed:
        return False
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in OWN_SITE
    return origin is not None and urlsplit(origin).netloc != headers.get("Host")


def _of_browser(headers: Mapping[str, str]) -> bool:
    """Browsers send the first with whatever they POST, and the second to hosts that they trust."""
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
    """Bounds what the bodies of all requests take together. `max_bytes` is the most that one may have. Event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._most = LARGE_BODIES * max_bytes
        self._held = 0
        self._turn = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """What large bodies take now."""
        return self._held

    def open(self) -> BodyHold:
        """For the body of one request; to be closed when the request has been answered."""
        return BodyHold(self)

    @contextlib.asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """For work on a body that keeps the event loop for its size: one at a time, and others have a turn between."""
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
                f"bodies of more than {self._most} bytes are held at a time; come again later",
                status=503,
                code="too_many_large_bodies",
                retry_after_s=1,
            )
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """See `BodyHold.close`."""
        self._held -= num_bytes


class BodyHold:
    """What the body of one request takes of a budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = self._taken = 0

    def add(self, num_bytes: int) -> None:
        """More of the body has come.

        Raises:
            RequestError: 503, there are too many large ones at a time.
        """
        self._size += num_bytes
        if self._size > LARGE_BODY_BYTES:
            self._budget.take(self._size - self._taken)
            self._taken = self._size

    def close(self) -> None:
        """The body is not needed any longer."""
        self._budget.give_back(self._taken)
        self._taken = self._size = 0
