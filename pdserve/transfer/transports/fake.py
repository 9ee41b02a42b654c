"""A transport that moves nothing: for warm-up requests, scheduler benchmarks, and tests of everything but the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.transfer.transport import Copy, MemoryRegion, RegionSet, TransportFacts


class FakeTransport:
    """Every write succeeds at once, after the same range check as the real ones. See `Transport` for threads."""

    name = "fake"
    facts = TransportFacts(protocol="none", moves_bytes=False)
    drain_timeout_s = 0.0
    fence_drain_timeout_s = 0.0

    def __init__(self) -> None:
        self._regions = RegionSet()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Note the regions."""
        self._regions.add(regions)

    def address(self) -> str:
        """Every fake has the same address."""
        return "fake"

    def open_receiver(self, peer: str) -> str:
        """As `address`."""
        return "fake"

    def fence(self, peer: str) -> bool:
        """Nothing lands."""
        return True

    def connect(self, address: str) -> None:
        """Any address will do."""

    def disconnect(self, address: str) -> None:
        """Nothing to forget."""

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Check the sources, copy nothing."""
        self._regions.check_sources(copies)

    def close(self) -> None:
        """Nothing to end."""
