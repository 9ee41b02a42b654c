"""Whether an address can be reached from outside, and what to say where that is not safe. Called by the launchers."""

from __future__ import annotations

import ipaddress
import logging

from pdserve.base.proof import MIN_TOKEN_CHARS, is_weak

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
