"""`auto`: which way is taken to whom, and what is offered where one of them cannot be had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pdserve.errors import ConfigError, TransferError
from pdserve.memory import shared
from pdserve.transfer.transport import Copy, MemoryRegion, Transport, TransportFacts
from pdserve.transfer.transports import shm as shm_share
from pdserve.transfer.transports.auto import AutoTransport, open_each
from pdserve.transfer.transports.link import RegionSet
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.transports.shm import ShmTransport

NUM_BYTES = 4096


class Network(MemoryTransport):
    """Reaches everybody on its hub, as mooncake does; its regions need not be shared."""

    name = "network"
    facts = TransportFacts(protocol="tcp", moves_bytes=True, max_outstanding=7)
    drain_timeout_s = 11.0


class End:
    """An `auto` of `ways`, and memory of it."""

    def __init__(self, ways: list[Transport], *, private: bool = False) -> None:
        memory = bytearray(NUM_BYTES) if private else shared.allocate(NUM_BYTES)
        self.bytes = np.frombuffer(memory, dtype=np.uint8)
        self.start = int(self.bytes.ctypes.data)
        self._wrote: list[str] = []
        for way in ways:
            self._watch(way)
        self.transport = AutoTransport(ways)
        self.transport.register([MemoryRegion(self.start, NUM_BYTES)])
        self.address = self.transport.address()

    def write_to(self, peer: End) -> str:
        """Connect and write a byte; the name of the way that was taken."""
        self.bytes[0] = 5
        peer.bytes[:] = 0
        self.transport.connect(peer.address)
        self.transport.write(peer.address, [Copy(self.start, peer.start + 1, 1)])
        assert peer.bytes[:3].tolist() == [0, 5, 0]
        return self._wrote.pop()

    def _watch(self, way: Transport) -> None:
        write = way.write

        def watched(address: str, copies: Sequence[Copy]) -> None:
            self._wrote.append(way.name)
            write(address, copies)

        way.write = watched  # type: ignore[method-assign]


Make = Callable[..., End]


@pytest.fixture
def make() -> Iterator[Make]:
    """Ends on one hub, closed at the end."""
    hub = MemoryHub()
    with contextlib.ExitStack() as stack:

        def make_end(*names: str, private: bool = False) -> End:
            openers: dict[str, Callable[[], Transport]] = {"shm": ShmTransport, "network": lambda: Network(hub)}
            end = End([openers[name]() for name in names], private=private)
            stack.callback(end.transport.close)
            return end

        yield make_end


def test_shared_memory_is_taken_within_a_host(make: Make) -> None:
    assert make("shm", "network").write_to(make("shm", "network")) == "shm"


def test_the_network_is_taken_to_another_host(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make("shm", "network"), make("shm", "network")
    monkeypatch.setattr(shm_share, "host_identity", lambda: "elsewhere")
    assert sender.write_to(receiver) == "network"


def test_the_network_is_taken_where_either_side_has_memory_that_cannot_be_mapped(make: Make) -> None:
    mapped, private = make("shm", "network"), make("shm", "network", private=True)
    assert "shm" in mapped.address and "shm" not in private.address
    assert private.transport.facts == TransportFacts(protocol="tcp", moves_bytes=True, max_outstanding=7)
    assert mapped.write_to(private) == private.write_to(mapped) == "network"


def test_without_a_common_way_the_peer_is_refused(make: Make) -> None:
    with pytest.raises(TransferError, match="the peer offers network, we have shm") as caught:
        make("shm").transport.connect(make("network").address)
    assert caught.value.code == "no_common_transport"


def test_memory_that_no_way_takes_is_refused_and_no_way_is_lost(make: Make) -> None:
    end = make("shm", "network")
    with pytest.raises(TransferError, match="overlaps"):
        end.transport.register([MemoryRegion(end.start + 10, 10)])
    assert "shm" in end.transport.address() and "network" in end.transport.address()
    assert end.transport.facts.protocol == "memory or tcp" and end.transport.drain_timeout_s == 11.0
    assert (end.transport.facts.writers, end.transport.facts.max_outstanding) == (2, 7), "what suits any of them"


def test_several_threads_that_connect_at_once_take_one_way(make: Make) -> None:
    for _ in range(20):
        sender, receiver = make("shm", "network"), make("shm", "network")
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(sender.transport.connect, [receiver.address] * 4)) == {None}
        assert sender.write_to(receiver) == "shm"


def test_what_cannot_be_opened_is_left_out_and_nothing_at_all_is_an_error() -> None:
    def absent() -> Transport:
        raise ConfigError("not installed")

    transport = open_each({"shm": absent, "network": lambda: Network(MemoryHub())})
    assert transport.facts.protocol == "tcp"
    transport.close()
    with pytest.raises(ConfigError, match="not installed"):
        open_each({"network": absent})


def test_regions_are_found_by_any_range_in_them() -> None:
    regions = RegionSet()
    regions.add([MemoryRegion(100, 50), MemoryRegion(300, 10)])
    assert [regions.find(*where) for where in ((100, 50), (149, 1), (305, 5))] == [0, 0, 1]
    assert all(regions.find(*where) is None for where in ((99, 1), (149, 2), (0, 1), (310, 1)))
    regions.check_sources([Copy(100, 0, 50), Copy(300, 0, 10), Copy(120, 0, 1)])
    for copy in (Copy(140, 0, 11), Copy(100, 0, -1), Copy(0, 0, 0)):
        with pytest.raises(TransferError, match="not registered"):
            regions.check_sources([Copy(100, 0, 1), copy])
