"""In-process transport over memmove, for tests and simulations with real bytes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.transports.link import RegionSet


class MemoryHub:
    """In-process network: regions by address. Thread-safe; shared by the transports of one test."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._regions: dict[str, RegionSet] = {}
        self._num_writers: Counter[str] = Counter()

    def join(self, address: str, regions: RegionSet) -> None:
        """Make `regions` reachable at `address`."""
        with self._changed:
            self._regions[address] = regions

    def leave(self, address: str) -> None:
        """Make `address` unreachable; return when writes under way to it have ended."""
        with self._changed:
            self._regions.pop(address, None)
            self._changed.wait_for(lambda: not self._num_writers[address])

    def find(self, address: str) -> RegionSet:
        """Return the regions at `address`. Raises TransferError (settled) when the address is unreachable."""
        with self._changed:
            regions = self._regions.get(address)
        if regions is None:
            raise TransferError(f"no peer at {address}", code="peer_unreachable")
        return regions

    @contextlib.contextmanager
    def writing(self, address: str) -> Iterator[RegionSet]:
        """Yield what `find` returns, and count a writer at `address` meanwhile."""
        with self._changed:
            regions = self.find(address)
            self._num_writers[address] += 1
        try:
            yield regions
        finally:
            with self._changed:
                self._num_writers[address] -= 1
                self._changed.notify_all()


class MemoryTransport:
    """Copies between registered regions of this process. See `Transport` for threads."""

    name = "memory"
    facts = TransportFacts(protocol="memory", moves_bytes=True)
    drain_timeout_s = 0.0
    fence_drain_timeout_s = 0.0

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._regions = RegionSet()
        self._address = _new_address()
        self._receivers: dict[str, str] = {}
        hub.join(self._address, self._regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable."""
        self._regions.add(regions)

    def address(self) -> str:
        """Return the address, which is unique per instance."""
        return self._address

    def open_receiver(self, peer: str) -> str:
        """Return an address that is unique per peer and fence."""
        if peer not in self._receivers:
            self._receivers[peer] = _new_address()
            self._hub.join(self._receivers[peer], self._regions)
        return self._receivers[peer]

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: peers are in this process."""

    def fence(self, peer: str) -> bool:
        """Make the peer's address unreachable."""
        if peer in self._receivers:
            self._hub.leave(self._receivers.pop(peer))
        return True

    def connect(self, address: str) -> None:
        """Check that the address is reachable."""
        self._hub.find(address)

    def disconnect(self, address: str) -> None:
        """Do nothing."""

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Copy with memmove, after checking all ranges on both sides."""
        self._regions.check_sources(copies)
        with self._hub.writing(address) as peer:
            for copy in copies:
                if copy.num_bytes and not peer.holds(copy.destination, copy.num_bytes):
                    raise TransferError(
                        f"destination {copy.destination:#x} + {copy.num_bytes} bytes is not registered at {address}",
                        code="bad_range",
                        retryable=False,
                    )
            for copy in copies:
                ctypes.memmove(copy.destination, copy.source, copy.num_bytes)

    def close(self) -> None:
        """Make all addresses unreachable."""
        for address in (self._address, *self._receivers.values()):
            self._hub.leave(address)


def _new_address() -> str:
    return f"memory:{uuid.uuid4().hex}"
