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
import logging
import re
import socket
from collections.abc import Sequence

from pdserve.base.proof import MIN_TOKEN_CHARS, is_weak
from pdserve.errors import ConfigError

log = logging.getLogger(__name__)


def reachable(host: str) -> bool:
    """Whether other machines can reach what listens on `host`. A name may mean anything: it counts as if."""
    try:
        return not ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.rstrip(".") != "localhost"


def warn_open(host: str, *, has_key: bool) -> None:
    """Say loudly that everyone who reaches this HTTP port may use it, where that is so."""
    if reachable(host) and not has_key:
        log.warning(
            "--host %s can be reached from outside, and no key is asked for: WHOEVER REACHES THE PORT MAY USE IT and "
            "end what others ask. Give --api-key (or PDSERVE_API_KEY), or let a firewall keep others away",
            host,
        )


def warn_unsealed(*hosts: str) -> None:
    """Say that peers are not asked who they are, where others can come as peers."""
    for host in dict.fromkeys(filter(reachable, hosts)):
        log.warning(
            "%s can be reached from outside, and PDSERVE_CONTROL_TOKEN is not set: whoever reaches the control or the "
            "bootstrap port there can come as a peer. Set the same secret on all servers",
            host,
        )


def warn_weak(token: str) -> None:
    """Say that a short control token can be guessed by one who watches the network."""
    if is_weak(token):
        log.warning(
            "PDSERVE_CONTROL_TOKEN has %d characters: who sees the servers talk can guess it offline. Take %d or more, "
            "such as openssl rand -hex 32 gives",
            len(token),
            MIN_TOKEN_CHARS,
        )


def url_host(host: str) -> str:
    """What stands for `host` in a URL that this machine can use."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


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
