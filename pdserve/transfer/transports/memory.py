"""A transport between parts of one process: memmove. For tests and simulated worlds with real bytes."""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Sequence

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, RegionSet, TransportFacts


class MemoryHub:
    """The "network": who is reachable at which address. Thread-safe; shared by the transports of one test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, RegionSet] = {}

    def join(self, address: str, regions: RegionSet) -> None:
        """Make `regions` reachable at `address`."""
        with self._lock:
            self._regions[address] = regions

    def leave(self, address: str) -> None:
        """The owner of `address` is gone."""
        with self._lock:
            self._regions.pop(address, None)

    def find(self, address: str) -> RegionSet:
        """The regions at `address`. Raises TransferError (settled) when nobody is there."""
        with self._lock:
            regions = self._regions.get(address)
        if regions is None:
            raise TransferError(f"no peer at {address}", code="peer_unreachable")
        return regions


class MemoryTransport:
    """Copies between registered regions of this process. See `Transport` for threads."""

    name = "memory"
    facts = TransportFacts(protocol="memory", moves_bytes=True)
    settle_s = 0.0

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._regions = RegionSet()
        self._address = f"memory:{uuid.uuid4().hex}"
        hub.join(self._address, self._regions)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable."""
        self._regions.add(regions)

    def address(self) -> str:
        """A fresh name per instance."""
        return self._address

    def connect(self, address: str) -> None:
        """Check that somebody is there."""
        self._hub.find(address)

    def disconnect(self, address: str) -> None:
        """Nothing to forget."""

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """memmove each copy, after all ranges were checked on both sides."""
        self._regions.check_sources(copies)
        peer = self._hub.find(address)
        for copy in copies:
            if copy.num_bytes and not peer.holds(copy.destination, copy.num_bytes):
                raise TransferError(
                    f"destination range {copy.destination:#x} + {copy.num_bytes} bytes is not registered at {address}",
                    code="bad_range",
                    retryable=False,
                )
        for copy in copies:
            ctypes.memmove(copy.destination, copy.source, copy.num_bytes)

    def close(self) -> None:
        """Be unreachable from now on."""
        self._hub.leave(self._address)
