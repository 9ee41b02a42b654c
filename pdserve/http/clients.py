"""Client identity, API keys, and the limit of concurrent requests per client. Used by the HTTP servers and the router.

A client is identified by its key, or without keys by its address. Behind trusted proxies the client is always the
forwarded address, because all clients of a proxy may send the same key. Event loop only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from pdserve.errors import ConfigError, RequestError

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
