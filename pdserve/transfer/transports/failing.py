"""A transport that wraps another one and fails a share of its writes: for tests of a running pair. Opened by
`registry`.

The environment variable's name is SGLang's. The roles fail the same share of the polls of transfers, on both servers
(`PollFailures` in `scheduler/roles/base`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import cast

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, NotifyingTransport, Transport, TransportFacts


class FailingTransport:
    """Wraps `inner`, and refuses each write with `probability` before any byte moves. See `Transport`."""

    def __init__(self, inner: Transport, probability: float, rng: random.Random | None = None) -> None:
        self._inner = inner
        self._probability = probability
        self._rng = rng or random.Random()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The inner transport's name, since peers must not see a difference."""
        return self._inner.name

    @property
    def facts(self) -> TransportFacts:
        """The inner transport's facts."""
        return self._inner.facts

    @property
    def drain_timeout_s(self) -> float:
        """The inner transport's timeout."""
        return self._inner.drain_timeout_s

    @property
    def fence_drain_timeout_s(self) -> float:
        """The inner transport's timeout."""
        return self._inner.fence_drain_timeout_s

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `Transport`."""
        self._inner.register(regions)

    def address(self) -> str:
        """See `Transport`."""
        return self._inner.address()

    def open_receiver(self, peer: str) -> str:
        """See `Transport`."""
        return self._inner.open_receiver(peer)

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """See `Transport`."""
        self._inner.allow_sources(peer, addresses)

    def fence(self, peer: str) -> bool:
        """See `Transport`."""
        return self._inner.fence(peer)

    def connect(self, address: str) -> None:
        """See `Transport`."""
        self._inner.connect(address)

    def disconnect(self, address: str) -> None:
        """See `Transport`."""
        self._inner.disconnect(address)

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """See `Transport`.

        Raises:
            TransferError: settled, for an injected failure; or the inner transport's error.
        """
        self._fail_perhaps()
        self._inner.write(address, copies)

    def write_and_notify(self, address: str, copies: Sequence[Copy], note: bytes) -> None:
        """See `NotifyingTransport`, which the inner transport must implement. Raises like `write`."""
        self._fail_perhaps()
        cast(NotifyingTransport, self._inner).write_and_notify(address, copies, note)

    def take_notifications(self) -> Sequence[bytes]:
        """See `NotifyingTransport`, which the inner transport must implement."""
        return cast(NotifyingTransport, self._inner).take_notifications()

    def close(self) -> None:
        """See `Transport`."""
        self._inner.close()

    def _fail_perhaps(self) -> None:
        with self._lock:
            fails = self._rng.random() < self._probability
        if fails:
            raise TransferError("injected failure of a write")
