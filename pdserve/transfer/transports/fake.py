"""A transport that moves no bytes: for warm-up requests, scheduler benchmarks, and tests without data."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.transports.link import RegionSet


class FakeTransport:
    """Every write succeeds at once, after the same range check as in real transports. See `Transport` for threads."""

    name = "fake"
    facts = TransportFacts(protocol="none", moves_bytes=False)
    drain_timeout_s = 0.0
    fence_drain_timeout_s = 0.0

    def __init__(self) -> None:
        self._regions = RegionSet()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Record the regions."""
        self._regions.add(regions)

    def address(self) -> str:
        """Return the address, which all fake transports share."""
        return "fake"

    def open_receiver(self, peer: str) -> str:
        """Return the same address as `address`."""
        return "fake"

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: writes never land."""

    def fence(self, peer: str) -> bool:
        """Return True: writes never land."""
        return True

    def connect(self, address: str) -> None:
        """Accept any address."""

    def disconnect(self, address: str) -> None:
        """Do nothing."""

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Check the sources, copy nothing."""
        self._regions.check_sources(copies)

    def close(self) -> None:
        """Do nothing."""
