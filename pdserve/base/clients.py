"""How many requests a client may have at a time, and who a client is. Used by the HTTP sides of servers and router.

A client is known by its key, and without keys by its address. Where proxies are trusted it is the address that they
name, whatever the key: they may all send the same one. Event loop only.
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
"""Environment variables that stand for the flags: a command line can be read by every user of the machine."""

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
"""Paths of servers, and of the router, that change what others see, or show what others ask."""


def split_keys(text: str | None) -> tuple[str, ...]:
    """The keys in a flag's value: one, or several with commas between them, so that clients can be told apart and a
    key can be changed while its predecessor is still taken.
    """
    return () if text is None else tuple(text.split(","))


def check_keys(flag: str, text: str | None) -> None:
    """Raise ConfigError, without showing the key, where one is empty or cannot travel in a header."""
    for key in split_keys(text):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            field = flag.removeprefix("--").replace("-", "_")
            raise ConfigError(f"{flag}: a key must be printable ASCII without spaces, and not empty", field=field)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a server knows; never in a repr."""

    api: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, api: str | None, admin: str | None) -> Keys:
        """From the values of `--api-key` and `--admin-api-key`."""
        return cls(split_keys(api), split_keys(admin))

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return bool(self.api or self.admin)

    def may(self, authorization: str | None, *, command: bool) -> bool:
        """Whether a request with this header may ask; `command`: on a path that changes what others see."""
        if command and self.admin:
            return _find(authorization, self.admin) is not None
        return not self.api or self.find(authorization) is not None

    def find(self, authorization: str | None) -> str | None:
        """The known key that the header brings."""
        return _find(authorization, (*self.api, *self.admin))


def _find(authorization: str | None, keys: tuple[str, ...]) -> str | None:
    """Takes as long for a key that is nearly right as for any other: all are compared, each in constant time."""
    kind, _, given = (authorization or "").partition(" ")
    sent = given.strip().encode()
    found = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    return found[0] if found and kind.lower() == "bearer" else None


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
RETRY_AFTER_S = 1


class ClientLimit:
    """Counts the requests of each client; `most` None: without a limit."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._running: Counter[str] = Counter()

    def take(self, client: str) -> AbstractContextManager[None]:
        """A place for one request, for as long as the block of `with` lasts; to be entered at once.

        Raises:
            RequestError: 429 when the client has as many as it may.
        """
        if self._most is not None and self._running[client] >= self._most:
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
    """Addresses and networks with commas between them, `*` for all.

    Raises:
        ConfigError: one is neither.
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
        raise ConfigError(
            f"{flag} takes addresses and networks with commas between them: {error}", field=field
        ) from error
    return tuple(found)


def client_address(peer: str, forwarded_for: Sequence[str], proxies: Sequence[Network]) -> str:
    """Who asks: `peer`, or what proxies that are trusted say in `X-Forwarded-For`.

    `forwarded_for` are the header's values in order. Each proxy appends the address that it saw, so the last one that
    is no trusted proxy is the client; what stands before it may be made up.
    """
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
