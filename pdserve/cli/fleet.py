"""Reads the state of a running deployment over HTTP, from a router or from one server.

`pdserve top`, `pdserve doctor` and `pdserve support-bundle` use it. Nothing here changes anything at a server.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError

from pdserve.base.hosts import LOOPBACK, without_credentials
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError, RequestError
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Seconds for a whole answer."""
MAX_TIMEOUTS, SHORT_TIMEOUT_S = 2, 4.0
"""After two answers that took too long, each further one has 4 s, so that a command ends within two minutes."""
MAX_BYTES = 64 << 20
TLS = "tls"
"""Code of the error of a failed TLS handshake."""
ROLES = {"prefill": "prefill", "decode": "decode", "regular": "unified", "null": "unified"}
"""Our names of roles, by the router's worker types and by the servers' modes."""
Json = dict[str, Any]
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return text of a server or model for a terminal: control characters, which a terminal obeys, become `\\x1b`."""
    return text.translate(_CONTROLS)


def open_session(url: str, ca_cert: str | None) -> tuple[str, requests.Session]:
    """Return the host of an HTTP URL, and a session for it. `ca_cert`: file or folder of CA certificates.

    Raises:
        ConfigError: `url` is no HTTP URL, or `ca_cert` does not exist.
    """
    try:
        address = urlsplit(url)
        host, valid = address.hostname, address.scheme in ("http", "https") and address.port != 0
    except ValueError:  # brackets without their partner, a port that is no port
        host, valid = None, False
    if not host or not valid:
        raise ConfigError(f"the address is {url!r}, but must be such as {DEFAULT_URL}", field="url")
    if ca_cert is not None and not Path(ca_cert).exists():
        raise ConfigError(f"--ca-cert {ca_cert}: there is no such file or folder", field="ca_cert")
    session = requests.Session()
    session.trust_env = host not in LOOPBACK  # a proxy cannot reach this host's loopback
    if ca_cert is not None:
        session.verify = ca_cert
    return host, session


def credentials_of(url: str) -> tuple[str, str] | None:
    """Return the user and the password of a URL, None without them."""
    found = requests.utils.get_auth_from_url(url)
    return found if any(found) else None


def tls_error(url: str, error: requests.exceptions.SSLError) -> RequestError:
    """Return the error for a connection whose TLS handshake failed; its code is `tls`."""
    return RequestError(f"{url}: no TLS connection: {_innermost(error)}; give --ca-cert", status=503, code=TLS)


class FleetClient:
    """HTTP client of one router or server. Used as a context manager; one thread."""

    def __init__(
        self, url: str, *, api_key: str | None = None, admin_api_key: str | None = None, ca_cert: str | None = None
    ) -> None:
        """A user and a password in `url` are sent as Basic authorization, and are in no message.

        Raises ConfigError for an address that is no HTTP URL, and for CA certificates that cannot be read.
        """
        self.url = without_credentials(url.rstrip("/").removesuffix("/v1"))
        self.host, self._http = open_session(self.url, ca_cert)
        self._auth = credentials_of(url)
        self._keys = (api_key, admin_api_key or api_key)
        self._num_timeouts = 0

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def get_bytes(self, path: str, *, admin: bool = False) -> bytes:
        """Return the body of a 200 response. `admin`: send the admin key, where there is one.

        Raises:
            RequestError: no answer, another status (`status` is the answer's), or more than `MAX_BYTES`.
        """
        key = self._keys[admin]
        headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        timeout_s = READ_TIMEOUT_S if self._num_timeouts < MAX_TIMEOUTS else SHORT_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        try:
            with self._http.get(
                self.url + path,
                headers=headers,
                auth=self._auth,
                stream=True,
                timeout=(CONNECT_TIMEOUT_S, timeout_s),
                allow_redirects=False,
            ) as response:
                body = b"".join(_bounded(response, deadline, timeout_s))
                status = response.status_code
        except requests.exceptions.SSLError as error:
            raise tls_error(self.url, error) from error
        except (requests.RequestException, HTTPError, OSError) as error:
            self._num_timeouts += time.monotonic() > deadline
            raise RequestError(f"nothing answers at {self.url}{path}: {_innermost(error)}", status=503) from error
        if status != requests.codes.ok:
            raise RequestError(f"{self.url}{path} answers {status}: {_message_of(body)}", status=status)
        return body

    def status_without_key(self, path: str) -> int | None:
        """Return the status of a request without a key; None without an answer."""
        try:
            timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
            with self._http.get(self.url + path, stream=True, timeout=timeout, allow_redirects=False) as response:
                return response.status_code
        except (requests.RequestException, OSError):
            return None

    def get_json(self, path: str, *, admin: bool = False) -> Json:
        """Return a JSON object. Raises RequestError, also for another body."""
        try:
            found = json.loads(self.get_bytes(path, admin=admin))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.url}{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RequestError(f"{self.url}{path} is a {type(found).__name__}, expected an object")
        return found


def _bounded(response: requests.Response, deadline: float, timeout_s: float) -> Iterator[bytes]:
    """Yield a body in pieces, as they arrive. Raises OSError beyond `MAX_BYTES` and after `deadline`."""
    num_bytes = 0
    while piece := response.raw.read1(1 << 16, decode_content=False):
        num_bytes += len(piece)
        if num_bytes > MAX_BYTES:
            raise OSError(f"the answer has more than {MAX_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise OSError(f"the answer takes longer than {timeout_s:g} s")
        yield piece


def _innermost(error: BaseException) -> str:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _message_of(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, LookupError, TypeError, RecursionError):
        return printable(body[:200].decode(errors="replace").strip()) or "no text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetServer:
    """One server. `role`: prefill, decode or unified.

    `info` is its `/get_server_info`, empty if `error` says why it could not be read. `entry` is its entry in the
    router's `/workers`, empty without a router. `observed` is its part of `/observe`, empty without the admin key.
    """

    url: str
    role: str
    info: Json
    error: str | None = None
    entry: Json = dataclasses.field(default_factory=dict)
    observed: Json = dataclasses.field(default_factory=dict)

    @property
    def facts(self) -> Json:
        """Facts of the first replica's engine."""
        facts = self.info.get("facts") or self.info.get("engine_facts")
        return facts if isinstance(facts, dict) else {}

    @property
    def replicas(self) -> list[Json]:
        """States of the replicas."""
        states = self.info.get("internal_states")
        return [one for one in states if isinstance(one, dict)] if isinstance(states, list) else []

    @property
    def healthy(self) -> bool:
        """Whether the router counts it as alive, or without a router whether it answered."""
        return bool(self.entry.get("is_healthy", self.error is None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """A deployment at one moment.

    `router` is the router's part of `/observe`, empty if it could not be read; None without a router. `unread` has the
    reason for each path that could not be read. `asked_at` and `answered_at` are this host's clock around the reading
    of `/get_server_info`, in seconds since 1970.
    """

    url: str
    servers: tuple[FleetServer, ...]
    router: Json | None
    pairs: tuple[Json, ...] = ()
    edges: tuple[Json, ...] = ()
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asked_at: float = 0.0
    answered_at: float = 0.0

    def of(self, role: str) -> list[FleetServer]:
        """Return the servers of a role."""
        return [server for server in self.servers if server.role == role]


SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError)
"""What code raises that reads an answer of another form than expected, such as that of another version."""


def other_form(what: str, error: Exception) -> str:
    """Return the message about an answer `what` that the code could not read."""
    return f"{what} has another form than this command expects: {type(error).__name__}: {error}"


def read_fleet(client: FleetClient) -> Fleet:
    """Read everything that `doctor` needs, by three requests.

    Raises:
        RequestError: `/get_server_info` cannot be read.
    """
    unread: dict[str, str] = {}
    workers = _attempt(client, "/workers", unread)
    observed = _attempt(client, "/observe", unread, admin=True)
    asked_at = time.time()
    info = client.get_json("/get_server_info")
    answered_at = time.time()
    edges, pairs = _objects(observed.get("edges")), _objects(observed.get("pairs"))
    shown = {str(one.get("url")): one for one in _objects(observed.get("workers"))}
    entries = _objects(workers.get("workers")) or list(shown.values())
    if "/workers" in unread and "router" not in observed:
        del unread["/workers"]  # a server has no such path
        servers, router = [_only_server(client.url, info, observed)], None
    else:
        infos = {one["url"]: one for name in ROLES for one in _objects(info.get(name)) if "url" in one}
        servers = [
            _server(entry, infos.get(entry["url"]), shown.get(entry["url"], {}).get("observed") or {})
            for entry in entries
            if isinstance(entry.get("url"), str)
        ]
        router = observed.get("router", {})
    return Fleet(
        url=client.url,
        servers=tuple(servers),
        router=router,
        pairs=tuple(pairs),
        edges=tuple(edges),
        unread=unread,
        asked_at=asked_at,
        answered_at=answered_at,
    )


def _only_server(url: str, info: Json, observed: Json) -> FleetServer:
    role = ROLES.get(str(info.get("disaggregation_mode")), "unified")
    return FleetServer(url=url, role=role, info=info, observed=observed)


def _server(entry: Json, info: Json | None, observed: Json) -> FleetServer:
    error = None
    if info is None:
        error = str(entry.get("last_error") or "the router has no answer of it")
    elif set(info) <= {"error", "url"}:
        error = str(info.get("error"))
    role = ROLES.get(str(entry.get("worker_type")), "unified")
    return FleetServer(
        url=str(entry["url"]), role=role, info={} if error else info or {}, error=error, entry=entry, observed=observed
    )


def _attempt(client: FleetClient, path: str, unread: dict[str, str], *, admin: bool = False) -> Json:
    """Return an object; `{}` if it cannot be read, with the reason in `unread`."""
    try:
        return client.get_json(path, admin=admin)
    except RequestError as error:
        unread[path] = error.message
        return {}


def _objects(value: object) -> list[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def add_connection_flags(parser: CommandParser) -> None:
    """Add the address and the flags that all three commands share."""
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"router or server (default: {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help=f"key of the service (or in {API_KEY})")
    add("--admin-api-key", metavar="KEY", help=f"its admin key, where it has one (or in {ADMIN_API_KEY})")
    add("--ca-cert", metavar="PEM", help="CA certificates of an https service; the system's when absent")


def client_of(args: Any) -> FleetClient:
    """Return the client for parsed `add_connection_flags`. Raises ConfigError for an invalid address."""
    return FleetClient(
        args.url,
        api_key=_first_key(args.api_key, os.environ.get(API_KEY)),
        admin_api_key=_first_key(args.admin_api_key, os.environ.get(ADMIN_API_KEY)),
        ca_cert=args.ca_cert,
    )


def _first_key(*given: str | None) -> str | None:
    # A server's variable may list several keys.
    return next((key.partition(",")[0].strip() for key in given if key is not None and key.strip()), None)
