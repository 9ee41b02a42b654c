"""Checks of every HTTP request: framing, path, keys, origin, body memory, concurrent requests per client.

Server and router each have one middleware, which asks these rules in this order and sends the refusals:

    framing_refusal ─> has_dots ─> key_refusal ─> page_refusal ─> bodies.open ─> take_client_slot ─> handler

Only the router asks `has_dots`, because only it forwards paths. The router reads the whole body before it takes the
client's slot. A server takes the slot first; its handler reads the body. A proof of the control token replaces the key
at a server.

With CORS origins, both answer a preflight request with 204 after the framing rule, before they ask for a key (`Cors`).

CORS prevents a page of another origin from reading responses, and from sending a key or a JSON content type. CORS does
not prevent other requests: a form, an image or a `fetch` of plain text reaches a server on loopback without a key.

A client is identified by its key, or without keys by its address. Behind trusted proxies the client is always the
forwarded address, because all clients of a proxy may send the same key. `BodyBudget` and `ClientLimit` are used on the
event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from pdserve.errors import ConfigError, RequestError
from pdserve.http.credentials import Keys
from pdserve.http.errors import HttpRefusal

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
MAX_QUOTINGS = 4
ELSEWHERE = "web pages of this origin are not allowed; add the origin to --cors-allowed-origins"


def framing_refusal(raw: RawHeaders, target_bytes: int) -> HttpRefusal | None:
    """Check a request with headers `raw`, and path and query of `target_bytes`; None if the request is allowed.

    An ambiguous body length lets a proxy and a server parse different requests (request smuggling). Therefore the
    connection of a refused request must be closed.
    """
    if target_bytes > MAX_TARGET_BYTES:
        return _closing(414, f"path and query are longer than {MAX_TARGET_BYTES} bytes", "uri_too_long")
    num_bytes, framing, encodings = 0, set(), []
    for name, value in raw:
        num_bytes += len(name) + len(value)
        if len(name) in _FRAMING_SIZES and (lower := name.lower()) in _FRAMING:
            framing.add(lower)
            if lower == b"content-encoding":
                encodings.append(value.strip().lower())
    if num_bytes > MAX_HEADER_BYTES:
        return _closing(400, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large")
    if b"content-length" in framing and b"transfer-encoding" in framing:
        return _closing(400, "a request has Content-Length or Transfer-Encoding, not both", "ambiguous_length")
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        return _closing(415, "Content-Encoding: compressed bodies are not supported", "unsupported_encoding")
    return None


def _closing(status: int, message: str, code: str) -> HttpRefusal:
    return HttpRefusal(status, message, code, {"Connection": "close"})


def page_refusal(
    method: str, headers: Mapping[str, str], allowed: Collection[str], *, acts: bool, needs_key: bool
) -> HttpRefusal | None:
    """Check origin and content type of a request; None if the request is allowed.

    Refused: requests of a browser for a page of another origin, and bodies that are not JSON. `allowed` are the CORS
    origins; `acts`: the path has an effect by any method. `needs_key`: the path needs a key, which a page of another
    origin cannot send without permission.
    """
    if (acts or method in CHANGING) and not needs_key and from_elsewhere(headers, allowed):
        return HttpRefusal(403, ELSEWHERE, "origin_not_allowed")
    given = headers.get("Content-Type", "")
    if given == "application/json" or method not in CHANGING or not _has_body(headers):
        return None
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    if kind == SNAPSHOT_TYPE or (kind in UNTYPED and not _of_browser(headers)):
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
    return origin is not None and urllib.parse.urlsplit(origin).netloc != headers.get("Host")


def _of_browser(headers: Mapping[str, str]) -> bool:
    """Browsers send `Origin` with every POST, and `Sec-Fetch-Site` to trustworthy hosts."""
    return "Origin" in headers or "Sec-Fetch-Site" in headers


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in headers


def has_dots(raw_path: str) -> bool:
    """Whether a path segment is `.` or `..`, also percent-encoded, up to `MAX_QUOTINGS` times.

    A worker would resolve such a path to another one than the path that was checked here. The query is ignored.
    """
    path = raw_path.partition("?")[0]
    if "." not in path and "%" not in path:
        return False
    for _ in range(MAX_QUOTINGS):
        path, before = urllib.parse.unquote(path), path
        if path == before:
            break
    return any(segment in (".", "..") for segment in path.replace("\\", "/").split("/"))


COMMANDS = frozenset(
    {
        "/flush_cache",
        "/hicache/storage-backend/clear",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/declare_peer_dead",
        "/migrate",
        "/replicate",
        "/migrate_in",
        "/migrate_stream",
        "/start_profile",
        "/stop_profile",
        "/pd_role_switch",
        "/extract",
        "/restore",
        "/suspend",
        "/resume",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/get_weights_by_name",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weight_version",
        "/observe",
        "/observe/history",
        "/logs",
    }
)
"""Admin paths of servers and router: they affect other clients, or show requests of other clients."""

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/generate"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a system text of Claude Code that changes with every request, and would end the common prefix of prompts."""
EMBEDDINGS_PATH = "/v1/embeddings"
OLLAMA_CHAT_PATH = "/api/chat"
OLLAMA_GENERATE_PATH = "/api/generate"
OLLAMA_TAGS_PATH = "/api/tags"
OLLAMA_PS_PATH = "/api/ps"
OLLAMA_SHOW_PATH = "/api/show"
OLLAMA_VERSION_PATH = "/api/version"
SCORE_PATH = "/v1/score"
RERANK_PATH = "/v1/rerank"
COHERE_RERANK_PATH = "/v2/rerank"
POOLING = (EMBEDDINGS_PATH, SCORE_PATH, RERANK_PATH, COHERE_RERANK_PATH)
"""Paths that compute prompts and generate no tokens. Only a server without a peer answers them."""
GENERATING = (
    *(CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, RESPONSES_PATH, MESSAGES_PATH),
    *(OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH),
    *POOLING,
)
"""Paths that compute requests: they count toward a client's limit, and their calls are recorded."""
OPEN_SESSION_PATH = "/open_session"
CLOSE_SESSION_PATH = "/close_session"
RESTORE_PATH = "/restore"
RESUME_PATH = "/resume"
CONTINUING = (RESTORE_PATH, RESUME_PATH)
"""Paths of a server that continue a stopped request. A router does not forward them."""
SNAPSHOT_TYPE = "application/vnd.pdserve.snapshot"
"""Content type of a request snapshot (`protocol/snapshot.py`). Pages of other origins cannot send it without leave."""
HEALTH_GENERATE_PATH = "/health_generate"
"""The GET path that computes a token."""

NO_SNIFF = ("X-Content-Type-Options", "nosniff")
"""Header of all responses: browsers must not guess their type."""
NO_STORE = ("Cache-Control", "no-store")
"""Header of responses with the data of one client: proxies must not store them."""
PREFLIGHT_S = 600
"""Seconds for which a browser remembers the answer to a CORS preflight request."""
WEIGHT_VERSION_HEADER = "X-Weight-Version"
"""Name of the version of the weights that computed a response, percent-encoded where it is not printable ASCII."""
EXPOSED_HEADERS = ("X-Request-Id", WEIGHT_VERSION_HEADER)
"""Headers of responses that pages of allowed origins can read."""


class Cors:
    """The CORS rules of one application: which pages of other origins may send requests and read the responses."""

    def __init__(self, origins: Collection[str], methods: Sequence[str]) -> None:
        """`origins`: allowed ones, `*` for all, empty: none. `methods`: those that pages may use."""
        self.origins = origins
        self._methods = ", ".join(methods)

    def preflight_answer(self, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers of the answer to a preflight request; None if the request needs a normal answer.

        The headers of `response_headers` are missing here, because every response gets them.
        """
        if not self.origins or method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
            return None
        if not self._allows(headers.get("Origin")):
            return {}
        return {
            "Access-Control-Allow-Methods": self._methods,
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", "*"),
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }

    def response_headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of each response to a request with the header `Origin`, None without it."""
        if origin is None or not self.origins:
            return {}
        allowed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": ", ".join(EXPOSED_HEADERS)}
        return {"Vary": "Origin"} | (allowed if self._allows(origin) else {})

    def _allows(self, origin: str | None) -> bool:
        return "*" in self.origins or origin in self.origins


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


def body_timeout() -> RequestError:
    """Return the error of a request whose body did not arrive in time."""
    return RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408, code="body_timeout")


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


class AccessRules:
    """The access rules of one application. Event loop only."""

    def __init__(
        self,
        keys: Keys,
        cors: Cors,
        proxies: Sequence[Network],
        max_requests_per_client: int | None,
        max_body_bytes: int,
    ) -> None:
        """`proxies`: trusted ones. `max_body_bytes`: limit of one body."""
        self.keys = keys
        self.cors = cors
        self.bodies = BodyBudget(max_body_bytes)
        self._proxies = proxies
        self._limit = ClientLimit(max_requests_per_client)

    def key_refusal(self, authorization: str | None, *, command: bool) -> HttpRefusal | None:
        """Check the `Authorization` header of a request; `command`: it needs an admin key. None if it is allowed."""
        if self.keys.may(authorization, command=command):
            return None
        text = "this path needs a valid API key as Authorization: Bearer KEY"
        return HttpRefusal(401, text, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    def page_refusal(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        command: bool,
        public: bool,
        proven: bool = False,
    ) -> HttpRefusal | None:
        """See `page_refusal`. `public`: the path needs no key.

        `proven`: the request has or needs a proof of the control token, which pages cannot send.
        """
        acts = command or path == HEALTH_GENERATE_PATH
        needs_key = proven or (not public and self.keys.required(command=command))
        return page_refusal(method, headers, self.cors.origins, acts=acts, needs_key=needs_key)

    def client(self, authorization: str | None, peer: str | None, forwarded_for: Sequence[str]) -> str:
        """Return the client that a request is counted for; see `clients`. `peer`: address, None if unknown."""
        key = self.keys.find(authorization)
        if key is not None and not self._proxies:
            return f"key {key}"
        return "unknown" if peer is None else client_address(peer, forwarded_for, self._proxies)

    def take_client_slot(self, client: str) -> AbstractContextManager[None]:
        """See `ClientLimit.take`."""
        return self._limit.take(client)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
RETRY_AFTER_S = 1


class ClientLimit:
    """Limits each client to `most` concurrent requests; None: no limit."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._running: Counter[str] = Counter()

    def take(self, client: str) -> AbstractContextManager[None]:
        """Return a context manager that counts one request of `client`; it must be entered at once.

        Raises:
            RequestError: 429, the client has reached its limit.
        """
        if self._most is None:
            return contextlib.nullcontext()
        if self._running[client] >= self._most:
            raise RequestError(
                f"this client has {self._most} requests running (--max-concurrent-requests-per-client); "
                "wait until one has ended",
                status=429,
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )
        return self._place(client)

    @contextlib.contextmanager
    def _place(self, client: str) -> Iterator[None]:
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


def parse_networks(flag: str, text: str | None) -> tuple[Network, ...]:
    """Parse comma-separated addresses and networks; `*` means all.

    Raises:
        ConfigError: an entry is neither an address nor a network.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    try:
        found = [
            ipaddress.ip_network(each, strict=False)
            for word in words
            for each in (("0.0.0.0/0", "::/0") if word == "*" else (word,))
        ]
    except ValueError as error:
        field = flag.removeprefix("--").replace("-", "_")
        raise ConfigError(f"{flag} takes addresses and networks, separated by commas: {error}", field=field) from error
    return tuple(found)


def client_address(peer: str, forwarded_for: Sequence[str], proxies: Sequence[Network]) -> str:
    """Return the client's address: `peer`, or behind trusted `proxies` the address in `X-Forwarded-For`.

    `forwarded_for` are the header's values in order. Each proxy appends the address of its peer, so the last address
    that is no trusted proxy is the client. Earlier addresses may be forged.
    """
    if not proxies:
        return peer
    address = peer
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",")]
    while hops and _trusted(address, proxies):
        address = hops.pop()
    return address


def _trusted(address: str, proxies: Sequence[Network]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in proxies)
