"""What transports share: their registered regions, and links to peers through engines that can be destroyed.

All transports keep a `RegionSet`; those over native engines have links.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion


class RegionSet:
    """The registered regions of a process, with a range check that engines do not make. Thread-safe to read."""

    def __init__(self) -> None:
        self._regions: tuple[MemoryRegion, ...] = ()
        self._starts: tuple[int, ...] = ()

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """All regions by address."""
        return self._regions

    def add(self, regions: Sequence[MemoryRegion]) -> None:
        """Add regions. Raises TransferError (settled) when one is empty or two overlap; then none is added."""
        merged = sorted((*self._regions, *regions), key=lambda region: region.address)
        for region in regions:
            if region.num_bytes <= 0 or region.address <= 0:
                raise TransferError(f"cannot register {region}: empty", code="bad_region", retryable=False)
        for left, right in itertools.pairwise(merged):
            if left.address + left.num_bytes > right.address:
                raise TransferError(f"cannot register {right}: overlaps {left}", code="bad_region", retryable=False)
        self._regions = tuple(merged)
        self._starts = tuple(region.address for region in merged)

    def find(self, address: int, num_bytes: int) -> int | None:
        """Return the index into `regions` of the region that holds `[address, address + num_bytes)`; None when there is
        none.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self._regions[index]
        return index if address + num_bytes <= region.address + region.num_bytes else None

    def holds(self, address: int, num_bytes: int) -> bool:
        """True when `[address, address + num_bytes)` lies in one region."""
        return self.find(address, num_bytes) is not None

    def check_sources(self, copies: Sequence[Copy]) -> None:
        """Raise TransferError (settled, not retryable) unless every source range is registered."""
        start, end = 0, -1
        for copy in copies:
            source, num_bytes = copy.source, copy.num_bytes
            if num_bytes >= 0 and start <= source and source + num_bytes <= end:
                continue  # most sources lie in the region of the previous one
            index = self.find(source, num_bytes)
            if num_bytes < 0 or index is None:
                raise TransferError(
                    f"source range {source:#x} + {num_bytes} bytes is not registered",
                    code="bad_range",
                    retryable=False,
                )
            start = self._regions[index].address
            end = start + self._regions[index].num_bytes


class Destroyable(Protocol):
    """A native engine that can be destroyed."""

    def destroy(self) -> None:
        """Destroy the engine: no byte moves after this."""
        ...


E = TypeVar("E", bound=Destroyable)
T = TypeVar("T")
REOPEN_INTERVAL_S = 1.0


class WritePermits:
    """Permits for entries under way to one peer. Thread-safe."""

    def __init__(self, num_permits: int) -> None:
        self._free = num_permits
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def hold(self, num_entries: int) -> Iterator[None]:
        """Hold `num_entries` permits after waiting for them; each holder ends within its own timeout."""
        with self._returned:
            self._returned.wait_for(lambda: self._free >= num_entries)
            self._free -= num_entries
        try:
            yield
        finally:
            with self._returned:
                self._free += num_entries
                self._returned.notify_all()


class Link(Generic[E]):
    """Connection to one peer. With engines of its own (`owned`), the link can be cut, after which no byte moves on it.

    open ── doom ──> doomed ── last borrower leaves, engines destroyed ──> cut
    """

    def __init__(self, engines: Sequence[E], session: str, *, owned: bool, num_permits: int) -> None:
        """Create an open link. Threads that write concurrently use different engines while enough are free."""
        self.session = session
        self.window = WritePermits(num_permits)
        self._engines = engines
        self._num_borrowers = [0] * len(engines)
        self._longest_unused = list(range(len(engines)))
        self._owned = owned
        self._lock = threading.Lock()
        self._doomed = False
        self._cut = threading.Event()

    @property
    def doomed(self) -> bool:
        """True once a write on the link failed, or the link was given up."""
        return self._doomed

    @contextlib.contextmanager
    def borrow(self) -> Iterator[E]:
        """Borrow, for one batch, the engine with the fewest borrowers; among equals, the least recently used.

        Raises:
            TransferError: (settled) the link is doomed.
        """
        with self._lock:
            if self._doomed:
                raise TransferError(f"the link to {self.session} was given up", code="link_down")
            number = min(self._longest_unused, key=self._num_borrowers.__getitem__)
            self._longest_unused.remove(number)
            self._longest_unused.append(number)
            self._num_borrowers[number] += 1
        try:
            yield self._engines[number]
        finally:
            with self._lock:
                self._num_borrowers[number] -= 1
                last = self._doomed and not any(self._num_borrowers)
            if last:
                self._end()

    def doom(self) -> None:
        """Refuse new borrowers, and cut the link when the last borrower has left. Any thread; may be called again."""
        with self._lock:
            if self._doomed:
                return
            self._doomed = True
            last = not any(self._num_borrowers)
        if last:
            self._end()

    def await_cut(self, timeout_s: float) -> bool:
        """Return True when no byte can move on this link any more; False after `timeout_s`, or when the engine is
        shared.
        """
        return self._owned and self._cut.wait(timeout_s)

    def _end(self) -> None:
        if self._owned:
            for engine in self._engines:
                engine.destroy()
        self._cut.set()


class LinkedPeer(Generic[E, T]):
    """A connected peer: `about` is its decoded address, `link` its connection, reopened after a failure."""

    def __init__(self, about: T, link: Link[E], open_link: Callable[[T], Link[E]]) -> None:
        self.about = about
        self._link = link
        self._open_link = open_link
        self._lock = threading.Lock()
        self._reopen_at = 0.0

    def usable_link(self) -> Link[E]:
        """Return the link; after a failure a new one, at most once every `REOPEN_INTERVAL_S`. Raises TransferError."""
        with self._lock:
            if self._link.doomed:
                now = time.monotonic()
                if now < self._reopen_at:
                    raise TransferError(f"the link to {self._link.session} failed a moment ago", code="link_down")
                self._reopen_at = now + REOPEN_INTERVAL_S
                self._link = self._open_link(self.about)
            return self._link

    def doom(self) -> None:
        """Give up the link. Writes under way fail."""
        self._link.doom()


class LinkedPeers(Generic[E, T]):
    """Connected peers by address. Thread-safe."""

    def __init__(self, open_link: Callable[[T], Link[E]]) -> None:
        self._open_link = open_link
        self._lock = threading.Lock()
        self._peers: dict[str, LinkedPeer[E, T]] = {}
        self._opening: dict[str, Future[None]] = {}

    def connect(self, address: str, about: T) -> None:
        """Open a link to the peer, unless one exists. Raises TransferError when no peer answers.

        Of several concurrent calls, one opens the link, and all share its result.
        """
        with self._lock:
            if address in self._peers:
                return
            opening = self._opening.get(address)
            if mine := opening is None:
                opening = self._opening[address] = Future()
        if not mine:
            opening.result()
            return
        try:
            peer = LinkedPeer(about, self._open_link(about), self._open_link)
        except BaseException as error:
            with self._lock:
                del self._opening[address]
            opening.set_exception(error)
            raise
        with self._lock:
            self._peers[address] = peer
            del self._opening[address]
        opening.set_result(None)

    def disconnect(self, address: str) -> None:
        """Forget a peer; unknown ones are ignored."""
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            peer.doom()

    def get(self, address: str) -> LinkedPeer[E, T]:
        """Return a connected peer. Raises TransferError when `address` is not connected."""
        with self._lock:
            peer = self._peers.get(address)
        if peer is None:
            raise TransferError(f"not connected to {address[:100]}", code="not_connected", retryable=False)
        return peer

    def close(self) -> None:
        """Forget all peers and give up their links."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.doom()
