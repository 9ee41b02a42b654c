"""Which hosts and ports a list of patterns means. Used by decode for the prefill servers that requests may name.

    10.0.0.2          10.0.0.2:8998          an address, at all ports or one
    10.0.0.0/24       [fd00::/8]:8998        a network
    prefill-0.svc     *.prefill.svc:8998     a name, or all names that end so

A name is matched as it is written, never resolved: a name that a stranger owns may resolve to any address, so a network
takes addresses only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import re
import socket
from collections.abc import Sequence

from pdserve.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_host(host: str) -> bool:
    """Whether `host` can be an IP address or the name of a host, without brackets."""
    return _address(host) is not None or _NAME.fullmatch(host) is not None


def canonical_host(host: str) -> str:
    """The one spelling of all that mean the same host. What is no host is returned as it is.

    A name is in lower case, without the last dot. An address is as `ipaddress` writes it; what the C library takes for
    IPv4 becomes that (`0x7f.1`, `2130706433`, `::ffff:127.0.0.1`).
    """
    if not is_host(host):
        return host
    address = _address(host)
    if address is not None:
        return str(address)
    name = _plain(host)
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(name))
    return name


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """`network` or `name`; a `name` that begins with a dot means all that end so. `port` None: all ports."""

    network: Network | None
    name: str
    port: int | None

    def matches(self, address: Address | None, name: str, port: int) -> bool:
        if self.port not in (None, port):
            return False
        if self.network is not None:
            return address is not None and address in self.network
        return name.endswith(self.name) if self.name.startswith(".") else name == self.name


class HostPatterns:
    """A parsed list, see `parse_host_patterns`. Immutable; any thread."""

    def __init__(self, patterns: Sequence[_Pattern]) -> None:
        self._patterns = tuple(patterns)

    def allow(self, host: str, port: int) -> bool:
        """Whether a pattern means `port` of `host`, which is written without brackets."""
        address, name = _address(host), _plain(host)
        return any(pattern.matches(address, name, port) for pattern in self._patterns)


@functools.lru_cache(maxsize=16)
def parse_host_patterns(flag: str, text: str) -> HostPatterns:
    """Patterns with commas between them.

    Raises:
        ConfigError: one is none, or there are none; the text names `flag`.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        if not words:
            raise ValueError("there is none")
        return HostPatterns([_parse(word) for word in words])
    except ValueError as error:
        field = flag.removeprefix("--").replace("-", "_")
        message = f"{flag} takes hosts and networks, with or without a port: {error}"
        raise ConfigError(message, field=field) from None


def _parse(word: str) -> _Pattern:
    host, port = word, ""
    if word.startswith("["):
        host, bracket, rest = word[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{word!r} is none")
        port = rest[1:] if rest else ""
    elif word.count(":") == 1:
        host, _, port = word.partition(":")
    if port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{word!r} has no port")
    number = int(port) if port else None
    try:
        return _Pattern(ipaddress.ip_network(host, strict=False), "", number)
    except ValueError:
        name = host.removeprefix("*.")
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{word!r} is none") from None
        return _Pattern(None, f".{_plain(name)}" if host.startswith("*.") else _plain(name), number)


def _address(host: str) -> Address | None:
    """The address that `host` writes, an IPv4 one also where it is written in IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _plain(name: str) -> str:
    return name.rstrip(".").lower()
