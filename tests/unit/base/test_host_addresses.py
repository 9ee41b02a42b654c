"""The addresses of this host, and those that a peer may connect from."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from pdserve.base.hosts import (
    LOOPBACK,
    MAX_HOST_ADDRESSES,
    outward_addresses,
    own_addresses,
    parse_address,
    peer_addresses,
)

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "eth0": [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "fe80::1%eth0"), (psutil.AF_LINK, "00:11:22:33:44:55")],
    "eth1": [(socket.AF_INET6, "FD00:0::2")],
}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_addresses_of_this_host_are_spelled_in_one_way() -> None:
    assert own_addresses() == {*LOOPBACK, "10.0.0.2", "fe80::1", "fd00::2"}


def test_peers_are_told_only_addresses_that_no_other_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outward_addresses() == ("10.0.0.2", "fd00::2")
    many = [SimpleNamespace(family=socket.AF_INET, address=f"10.1.0.{n}") for n in range(200)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": many})
    assert len(outward_addresses()) == MAX_HOST_ADDRESSES


@pytest.mark.parametrize("known", [["10.0.0.2"], ["10.9.9.9", "::ffff:10.0.0.2"], ["127.0.0.5"], ["::1"]])
def test_a_peer_on_this_host_may_use_all_its_addresses(known: list[str]) -> None:
    assert peer_addresses(known) >= own_addresses()
    assert "127.0.0.66" not in peer_addresses(known)


def test_a_peer_on_another_host_has_its_known_addresses_only() -> None:
    assert peer_addresses(["10.0.0.3", "prefill-0.svc", "", "fd00::3%eth0"]) == {"10.0.0.3", "fd00::3"}
    assert peer_addresses([]) == frozenset()


def test_a_mapped_address_is_the_one_inside() -> None:
    assert str(parse_address("::ffff:10.0.0.2")) == "10.0.0.2"
    assert parse_address("prefill-0.svc") is None
