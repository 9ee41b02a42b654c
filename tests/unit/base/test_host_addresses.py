"""The addresses of this host, and those that a peer may connect from."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import psutil
import pytest

from pdserve.base.hosts import (
    LOOPBACK,
    MAX_HOST_ADDRESSES,
    MAX_SOURCES,
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


Interfaces = Mapping[str, Sequence[tuple[int, str]]]


def set_interfaces(monkeypatch: pytest.MonkeyPatch, interfaces: Interfaces, down: Sequence[str] = ()) -> None:
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in interfaces.items()
    }
    states = {name: SimpleNamespace(isup=name not in down) for name in interfaces if name != "eth1"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_interfaces(monkeypatch, INTERFACES)


def many(net: str, count: int) -> list[tuple[int, str]]:
    return [(socket.AF_INET, f"{net}.{n // 250}.{n % 250}") for n in range(count)]


def test_addresses_of_this_host_are_spelled_in_one_way() -> None:
    assert own_addresses() == (*LOOPBACK, "10.0.0.2", "fe80::1", "fd00::2")


def test_peers_are_told_only_addresses_that_no_other_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outward_addresses() == ("10.0.0.2", "fd00::2")
    set_interfaces(monkeypatch, {"eth0": many("10.1", 200)})
    assert len(outward_addresses()) == MAX_HOST_ADDRESSES


def test_peers_are_told_of_the_address_at_which_they_reach_this_host_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_interfaces(monkeypatch, {"eth0": many("10.1", 200)})
    assert outward_addresses("::ffff:10.1.0.199")[:2] == ("10.1.0.199", "10.1.0.0")
    assert outward_addresses("192.0.2.7")[0] == "192.0.2.7", "NAT"
    assert outward_addresses("10.1.0.1")[:3] == ("10.1.0.1", "10.1.0.0", "10.1.0.2")
    for host in ("0.0.0.0", "::", "127.0.0.1", "fe80::1", "prefill-0.svc", ""):
        assert outward_addresses(host)[0] == "10.1.0.0"


SERVICES = {
    "kube-ipvs0": many("10.96", 3000),
    "dummy0": [(socket.AF_INET, "10.2.0.1")],
    "eth2": [(socket.AF_INET, "10.3.0.1")],
}


def test_addresses_that_all_hosts_of_a_cluster_have_are_not_this_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes has each service's address at each node, where kube-proxy uses IPVS."""
    set_interfaces(monkeypatch, {**SERVICES, **INTERFACES}, down=["eth2", "kube-ipvs0"])
    assert outward_addresses() == ("10.0.0.2", "fd00::2")
    for known in (["10.96.0.1"], ["10.2.0.1"], ["10.3.0.1"]):
        assert list(peer_addresses(known)) == known


def test_there_are_never_too_many_for_a_filter_and_the_known_ones_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_interfaces(monkeypatch, {**SERVICES, **INTERFACES}, down=["eth2"])
    known = ["10.9.9.9", "10.0.0.2"]
    found = peer_addresses(known)
    assert len(found) == MAX_SOURCES and len(set(found)) == MAX_SOURCES
    assert found[:6] == (*known, *LOOPBACK, "fe80::1", "fd00::2")
    assert "10.96.0.0" in found, "a process here may use them"


@pytest.mark.parametrize("known", [["10.0.0.2"], ["10.9.9.9", "::ffff:10.0.0.2"], ["127.0.0.5"], ["::1"]])
def test_a_peer_on_this_host_may_use_all_its_addresses(known: list[str]) -> None:
    assert {*peer_addresses(known)} >= {*own_addresses()}
    assert "127.0.0.66" not in peer_addresses(known)


def test_a_peer_on_another_host_has_its_known_addresses_only() -> None:
    assert peer_addresses(["10.0.0.3", "prefill-0.svc", "", "fd00::3%eth0"]) == ("10.0.0.3", "fd00::3")
    assert peer_addresses([]) == ()


def test_a_mapped_address_is_the_one_inside() -> None:
    assert str(parse_address("::ffff:10.0.0.2")) == "10.0.0.2"
    assert parse_address("prefill-0.svc") is None
