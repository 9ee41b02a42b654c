"""Hosts: addresses, URLs, warnings about open ports, and patterns for the prefill servers that requests may name.

    10.0.0.2          10.0.0.2:8998          an address, at all ports or one
    10.0.0.0/24       [fd00::/8]:8998        a network
    prefill-0.svc     *.prefill.svc:8998     a name, or all names with that suffix

A name is matched as text and never resolved: a name under foreign control may resolve to any address. A network
therefore matches addresses only. Addresses are spelled as `ipaddress` spells them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import psutil

from pdserve.base.proof import MIN_TOKEN_CHARS, is_weak
from pdserve.errors import ConfigError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_HOST_ADDRESSES = 64
"""Most addresses of a host that are sent to peers."""
MAX_PEER_ADDRESSES = 128
"""Most known addresses of a peer that are used, the first ones."""
MAX_SOURCES = 192
"""Most addresses that a peer's connections may come from.

The kernel refuses filters that are larger than `net.core.optmem_max` allows. With 128 KB, the default since Linux 6.8,
some 2,000 addresses fit. With 20 KB, 140 IPv6 addresses may be too many. A refusal is logged; the former filter stays.
"""
LOOPBACK = ("127.0.0.1", "::1")
_SHARED_INTERFACES = ("kube-ipvs", "dummy")
"""Prefixes of interfaces whose addresses other hosts may have too: `kube-ipvs0` of every Kubernetes node has those of
all services.
"""


def parse_address(text: str) -> IPAddress | None:
    """Parse an IP address, an IPv4-mapped IPv6 address as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def without_credentials(url: str) -> str:
    """Return a URL without its user and password, for messages and results."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def own_addresses() -> tuple[str, ...]:
    """Return `LOOPBACK` and all IP addresses of this host's interfaces; last those that other hosts may also have."""
    own, shared = _interface_addresses()
    return tuple(dict.fromkeys((*LOOPBACK, *own, *shared)))


def outward_addresses(host: str = "") -> tuple[str, ...]:
    """Return the addresses from which this host connects to others, at most `MAX_HOST_ADDRESSES`.

    `host`, at which peers reach this host, comes first if it is an address. Loopback and link-local addresses are left
    out, since any host has them; so are those of interfaces that are not up, and of `kube-ipvs` and dummy interfaces.
    """
    found = _parsed((host, *_interface_addresses()[0]))
    outward = (str(each) for each in found if not (each.is_loopback or each.is_link_local or each.is_unspecified))
    return tuple(dict.fromkeys(outward))[:MAX_HOST_ADDRESSES]


def peer_addresses(known: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that a peer's connections may come from, given the known ones of its host.

    At most `MAX_SOURCES`, the known ones first. Names are left out. A peer with an address that only this host has runs
    on this host, so it may use all addresses of this host.
    """
    parsed, own = _parsed(known), _interface_addresses()[0]
    addresses = dict.fromkeys(str(each) for each in parsed)
    if not addresses.keys().isdisjoint(own) or any(each.is_loopback for each in parsed):
        addresses |= dict.fromkeys(own_addresses())
    return tuple(addresses)[:MAX_SOURCES]


def _interface_addresses() -> tuple[list[str], list[str]]:
    """Return the IP addresses of this host's interfaces: its own ones, and those that other hosts may have too."""
    own: list[str] = []
    shared: list[str] = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name not in states or states[name].isup
        texts = (each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6))
        wanted = own if is_up and not name.startswith(_SHARED_INTERFACES) else shared
        wanted += map(str, _parsed(texts))
    return own, shared


def _parsed(texts: Iterable[str]) -> list[IPAddress]:
    """Return the IP addresses in `texts` without their scopes."""
    found = (parse_address(text.partition("%")[0]) for text in texts)
    return [address for address in found if address is not None]


log = logging.getLogger(__name__)


def reachable(host: str) -> bool:
    """Whether other machines can reach a socket bound to `host`. True for every name except localhost."""
    try:
        return not ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.rstrip(".") != "localhost"


def warn_open(host: str, *, has_key: bool) -> None:
    """Log a warning if `host` is reachable from other machines and no API key is set."""
    if reachable(host) and not has_key:
        log.warning(
            "--host %s can be reached from other machines and no API key is set: ANY CLIENT THAT REACHES THE PORT CAN "
            "USE THIS SERVER and abort requests of other clients. Set --api-key (or PDSERVE_API_KEY) or use a firewall",
            host,
        )


def warn_unsealed(*hosts: str) -> None:
    """Log a warning for each of `hosts` that other machines can reach. Called when no control token is set."""
    for host in dict.fromkeys(filter(reachable, hosts)):
        log.warning(
            "%s can be reached from other machines and PDSERVE_CONTROL_TOKEN is not set: any process that reaches the "
            "control or bootstrap port can act as a peer. Set the same secret on all servers",
            host,
        )


def warn_weak(token: str) -> None:
    """Log a warning if the control token is short enough for an eavesdropper to guess."""
    if is_weak(token):
        log.warning(
            "PDSERVE_CONTROL_TOKEN has %d characters: an eavesdropper can guess it offline. Use %d or more characters, "
            "for example from openssl rand -hex 32",
            len(token),
            MIN_TOKEN_CHARS,
        )


def url_host(host: str) -> str:
    """Return `host` for a URL used on this machine: any-address becomes loopback, IPv6 gets brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def server_url(text: str, *, field: str) -> str:
    """Return the base URL `http(s)://host[:port]` of a server, without a trailing slash.

    Raises:
        ConfigError: `text` is no URL, or has more than scheme, host and port. The message names the flag of `field`.
    """
    flag = f"--{field.replace('_', '-')}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not a URL: {error}", field=field) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{flag} needs a URL such as http://127.0.0.1:30000, got {text!r}", field=field)
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{flag} takes scheme, host and port only, got {text!r}", field=field)
    return f"{parts.scheme}://{parts.netloc}"


_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_host(host: str) -> bool:
    """Whether `host` is an IP address without brackets or a valid host name."""
    return parse_address(host) is not None or _NAME.fullmatch(host) is not None


def canonical_host(host: str) -> str:
    """Return the canonical spelling of `host`; text that is no host is returned unchanged.

    Names are lower case without the trailing dot. Addresses are as `ipaddress` writes them. Other spellings of an IPv4
    address that the C library accepts become that address (`0x7f.1`, `2130706433`, `::ffff:127.0.0.1`).
    """
    if not is_host(host):
        return host
    address = parse_address(host)
    if address is not None:
        return str(address)
    name = _plain(host)
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(name))
    return name


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """`network` or `name`; a `name` with a leading dot matches as a suffix. `port` None: all ports."""

    network: Network | None
    name: str
    port: int | None

    def matches(self, address: IPAddress | None, name: str, port: int) -> bool:
        if self.port not in (None, port):
            return False
        if self.network is not None:
            return address is not None and address in self.network
        return name.endswith(self.name) if self.name.startswith(".") else name == self.name


class HostPatterns:
    """A parsed pattern list, see `parse_host_patterns`. Immutable; usable from any thread."""

    def __init__(self, patterns: Sequence[_Pattern]) -> None:
        self._patterns = tuple(patterns)

    def allow(self, host: str, port: int) -> bool:
        """Whether a pattern matches `port` of `host`, which is written without brackets."""
        address, name = parse_address(host), _plain(host)
        return any(pattern.matches(address, name, port) for pattern in self._patterns)


@functools.lru_cache(maxsize=16)
def parse_host_patterns(flag: str, text: str) -> HostPatterns:
    """Parse comma-separated patterns.

    Raises:
        ConfigError: a pattern is malformed, or the list is empty; the message names `flag`.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        if not words:
            raise ValueError("the list is empty")
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
            raise ValueError(f"{word!r} is malformed")
        port = rest[1:] if rest else ""
    elif word.count(":") == 1:
        host, _, port = word.partition(":")
    if port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{word!r} has no valid port")
    number = int(port) if port else None
    try:
        return _Pattern(ipaddress.ip_network(host, strict=False), "", number)
    except ValueError:
        name = host.removeprefix("*.")
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{word!r} is malformed") from None
        return _Pattern(None, f".{_plain(name)}" if host.startswith("*.") else _plain(name), number)


def _plain(name: str) -> str:
    return name.rstrip(".").lower()
