"""What prefill keeps of receivers and requests that have not met: early `TransferInfo` messages, and tombstones.

Owned by `SendSide`; scheduler thread only.
"""

from __future__ import annotations

import dataclasses

from pdserve.base.clock import Clock
from pdserve.protocol.failure import Failure
from pdserve.transfer.wire import MemoryKey, TransferInfo

MAX_EARLY = 4096
MAX_EARLY_PAGES = 1 << 22
"""Most pages in all early messages together, about 130 MB."""
MAX_TOMBSTONES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyTransferInfo:
    """A `TransferInfo` that arrived before its request; `instance` is the receiver's process."""

    expires_at: float
    instance: str
    info: TransferInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Tombstone:
    """Failure for a receiver whose request has ended or moved. `moved_to`: the replica that has it, if it moved."""

    failure: Failure
    moved_to: int | None = None


class EarlyArrivals:
    """Early messages by key, tombstones by (room, prompt digest). Lifetimes are equal, so the oldest expires first."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._early: dict[MemoryKey, EarlyTransferInfo] = {}
        self._num_pages = 0
        self._tombstones: dict[tuple[int, str], tuple[float, Tombstone]] = {}

    @property
    def num_early(self) -> int:
        """Number of receivers whose prefill request has not arrived yet."""
        return len(self._early)

    @property
    def num_tombstones(self) -> int:
        """Number of requests that ended before their receiver came."""
        return len(self._tombstones)

    def keep(self, instance: str, info: TransferInfo) -> bool:
        """Keep a message until its request arrives; a known key keeps its deadline. Returns False when the limits
        are reached.
        """
        if info.key in self._early:
            return True
        num_pages = _num_pages(info)
        if len(self._early) >= MAX_EARLY or self._num_pages + num_pages > MAX_EARLY_PAGES:
            return False
        self._num_pages += num_pages
        self._early[info.key] = EarlyTransferInfo(self._clock.now() + self._timeout_s, instance, info)
        return True

    def take_room(self, room: int) -> list[EarlyTransferInfo]:
        """Remove and return the early messages for `room`, which opens now."""
        keys = [key for key in self._early if key.room == room]
        return [self._take(key) for key in keys]

    def forget_key(self, key: MemoryKey) -> None:
        """Drop the message of `key`, which its receiver aborted."""
        if key in self._early:
            self._take(key)

    def forget_peer(self, instance: str) -> None:
        """Drop all messages of a dead receiver process."""
        for key in [key for key, early in self._early.items() if early.instance == instance]:
            self._take(key)

    def add_tombstone(self, room: int, digest: str, verdict: Tombstone) -> None:
        """Record that a request ended, or moved to another replica, before its receiver was known."""
        self._tombstones.pop((room, digest), None)
        self._tombstones[room, digest] = (self._clock.now() + self._timeout_s, verdict)
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def pop_tombstone(self, room: int, digest: str) -> Tombstone | None:
        """Remove and return the tombstone of this room and prompt; None when there is none."""
        entry = self._tombstones.pop((room, digest), None)
        return None if entry is None else entry[1]

    def expire(self) -> list[EarlyTransferInfo]:
        """Drop expired entries, and return the messages among them."""
        now = self._clock.now()
        expired: list[EarlyTransferInfo] = []
        while self._early:
            key, early = next(iter(self._early.items()))
            if now < early.expires_at:
                break
            expired.append(self._take(key))
        while self._tombstones:
            mark, (expires_at, _) = next(iter(self._tombstones.items()))
            if now < expires_at:
                break
            del self._tombstones[mark]
        return expired

    def _take(self, key: MemoryKey) -> EarlyTransferInfo:
        early = self._early.pop(key)
        self._num_pages -= _num_pages(early.info)
        return early


def _num_pages(info: TransferInfo) -> int:
    return sum(map(len, info.pages)) + sum(map(len, info.state_indices))
