"""How many requests a client may have at a time, and who a client is. Used by the HTTP sides of servers and router.

A client is known by its key, and without keys by its address. Where proxies are trusted it is the address that they
name, whatever the key: they may all send the same one. Event loop only.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from pdserve.errors import ConfigError, RequestError

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
