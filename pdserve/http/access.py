"""Checks of every HTTP request: framing, path, keys, origin, body memory, concurrent requests per client. Access log.

Server and router each have one middleware, which asks these rules in this order and sends the refusals:

    framing_refusal ─> has_dots ─> key_refusal ─> page_refusal ─> bodies.open ─> take_client_slot ─> handler

Only the router asks `has_dots`, because only it forwards paths. The router reads the whole body before it takes the
client's slot. A server takes the slot first; its handler reads the body. A proof of the control token replaces the key
at a server.

With CORS origins, both answer a preflight request with 204 after the framing rule, before they ask for a key (`Cors`).

CORS prevents a page of another origin from reading responses, and from sending a key or a JSON content type. CORS does
not prevent other requests: a form, an image or a `fetch` of plain text reaches a server on loopback without a key.

A client is identified by its key, or without keys by its address. Behind trusted proxies the client is always the
forwarded address, because all clients of a proxy may send the same key. `Keys` and `ClientLimit` are used on the event
loop only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import urllib.parse
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from pdserve.base.log import about, escaped
from pdserve.errors import ConfigError, RequestError
from pdserve.http.bodies import BodyBudget
from pdserve.http.errors import HttpRefusal

log = logging.getLogger("pdserve.access")

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
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/declare_peer_dead",
        "/start_profile",
        "/stop_profile",
        "/pd_role_switch",
        "/observe",
    }
)
"""Admin paths of servers and router: they affect other clients, or show requests of other clients."""

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/generate"
RESPONSES_PATH = "/v1/responses"
GENERATING = (CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, RESPONSES_PATH)
"""Paths that generate tokens: they count toward a client's limit, and their calls are recorded."""
HEALTH_GENERATE_PATH = "/health_generate"
"""The GET path that computes a token."""

NO_SNIFF = ("X-Content-Type-Options", "nosniff")
"""Header of all responses: browsers must not guess their type."""
NO_STORE = ("Cache-Control", "no-store")
"""Header of responses with the data of one client: proxies must not store them."""
PREFLIGHT_S = 600
"""Seconds for which a browser remembers the answer to a CORS preflight request."""
EXPOSED_HEADERS = ("X-Request-Id",)
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


API_KEY = "PDSERVE_API_KEY"
ADMIN_API_KEY = "PDSERVE_ADMIN_API_KEY"
WORKER_API_KEY = "PDSERVE_WORKER_API_KEY"
WORKER_ADMIN_API_KEY = "PDSERVE_WORKER_ADMIN_API_KEY"
"""Environment variables that replace the flags: every user of the machine can read a command line."""


def split_keys(text: str | None) -> tuple[str, ...]:
    """Split a flag's value at commas into keys.

    Several keys identify several clients, and allow a key rotation in which old and new key are both valid.
    """
    return () if text is None else tuple(text.split(","))


def check_keys(flag: str, text: str | None) -> None:
    """Raise ConfigError if a key is empty or not valid in a header. The message does not contain the key."""
    for key in split_keys(text):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            field = flag.removeprefix("--").replace("-", "_")
            raise ConfigError(f"{flag}: a key must be printable ASCII without spaces, and not empty", field=field)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The valid keys of a server; a repr does not contain them."""

    api: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, api: str | None, admin: str | None) -> Keys:
        """Parse the values of `--api-key` and `--admin-api-key`."""
        return cls(split_keys(api), split_keys(admin))

    @property
    def some(self) -> bool:
        """Whether any key is set."""
        return bool(self.api or self.admin)

    def required(self, *, command: bool) -> bool:
        """Whether a request needs a key; `command`: on a path of `COMMANDS`. Public paths are not considered."""
        return bool(self.api or (command and self.admin))

    def may(self, authorization: str | None, *, command: bool) -> bool:
        """Whether a request with this `Authorization` header is allowed; `command`: on a path of `COMMANDS`."""
        if command and self.admin:
            return _find(authorization, self.admin) is not None
        return not self.api or self.find(authorization) is not None

    def find(self, authorization: str | None) -> str | None:
        """Return the valid key in the `Authorization` header; None without one."""
        if not self.some:
            return None
        return _find(authorization, (*self.api, *self.admin))


def _find(authorization: str | None, keys: tuple[str, ...]) -> str | None:
    """Compare all keys, each in constant time, so that timing reveals nothing about a key."""
    kind, _, given = (authorization or "").partition(" ")
    sent = given.strip().encode()
    found = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    return found[0] if found and kind.lower() == "bearer" else None


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


POLLED_PATHS = frozenset(
    {
        *("/health", "/health_generate", "/health_pair", "/ready", "/readiness", "/liveness"),
        *("/metrics", "/engine_metrics", "/get_load", "/v1/loads", "/control_challenge", "/observe"),
    }
)
"""Paths that programs poll."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before the answer began."""


def log_access(
    *, client: str, method: str, path: str, status: int, seconds: float, request_id: str, complete: bool = True
) -> None:
    """Log one request at its end (`--access-log`): `127.0.0.1 POST /v1/chat/completions 200 812.3 ms`.

    Requests of load balancers, routers and Prometheus that succeed are logged at level debug only, since they come
    every few seconds. `client` is an address; a key is never logged. `seconds`: until the last byte was sent.
    `complete` False: the answer was cut off.
    """
    level = logging.DEBUG if path in POLLED_PATHS and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round(1000 * seconds, 1),
        "complete": complete,
    }
    text = f"{escaped(client)} {escaped(method)} {escaped(path)} {status} {1000 * seconds:.1f} ms"
    log.log(level, "%s%s", text, "" if complete else ", cut off", extra=about(request_id, fields=fields))
