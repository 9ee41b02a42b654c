"""IP addresses of this host and of peers' hosts. As text they are spelled as `ipaddress` does."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_HOST_ADDRESSES = 64
"""Most addresses of a host that are sent to peers."""
LOOPBACK = ("127.0.0.1", "::1")


def parse_address(text: str) -> IPAddress | None:
    """Parse an IP address, an IPv4-mapped IPv6 address as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def own_addresses() -> frozenset[str]:
    """Return all IP addresses of this host's interfaces, and `LOOPBACK`."""
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    texts = (each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(str(each) for each in _parsed([*texts, *LOOPBACK]))


def outward_addresses() -> tuple[str, ...]:
    """Return the addresses from which this host connects to others, at most `MAX_HOST_ADDRESSES`.

    Loopback and link-local addresses are left out, since any host has them.
    """
    outward = [str(each) for each in _parsed(own_addresses()) if not (each.is_loopback or each.is_link_local)]
    return tuple(sorted(outward)[:MAX_HOST_ADDRESSES])


def peer_addresses(known: Iterable[str]) -> frozenset[str]:
    """Return the addresses that a peer's connections may come from, given the known ones of its host.

    Names are left out. A peer with an address of this host runs on this host, so it may use all addresses of this host.
    """
    parsed, own = _parsed(known), own_addresses()
    addresses = frozenset(str(each) for each in parsed)
    is_here = bool(addresses & own) or any(each.is_loopback for each in parsed)
    return addresses | own if is_here else addresses


def _parsed(texts: Iterable[str]) -> list[IPAddress]:
    """Return the IP addresses in `texts` without their scopes."""
    found = (parse_address(text.partition("%")[0]) for text in texts)
    return [address for address in found if address is not None]
