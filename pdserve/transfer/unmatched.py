"""Halves that have not met: receivers whose prefill request has not come, and requests that ended before their Meta.

Owned by `SendSide`, scheduler thread only.

    Meta, no request yet     ─> waits (early)  ─> the request opens its room: taken
                                               ─> the time is up: turned away
    request ended, no Meta   ─> tombstone      ─> Meta comes: turned away with the same failure
      (or another replica has it)                 (or sent there)
                                               ─> the room opens again with this prompt, or the time is up: gone
"""

from __future__ import annotations

import dataclasses

from pdserve.base.clock import Clock
from pdserve.protocol.failure import Failure
from pdserve.transfer.wire import MemoryKey, Meta

MAX_EARLY = 4096
MAX_EARLY_PAGES = 1 << 22
"""Pages that all early Metas name together, some 130 MB."""
MAX_TOMBSTONES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyTransferInfo:
    """A Meta that came before its request; `instance` is the receiver's process."""

    expires_at: float
    instance: str
    meta: Meta


@dataclasses.dataclass(frozen=True, slots=True)
class Tombstone:
    """What a receiver is told that comes too late, or to the wrong replica: then `moved_to` is the right one."""

    failure: Failure
    moved_to: int | None = None


class EarlyArrivals:
    """Early Metas by key, tombstones by (room, prompt digest). All live equally long, so the oldest expires first."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._early: dict[MemoryKey, EarlyTransferInfo] = {}
        self._num_pages = 0
        self._tombstones: dict[tuple[int, str], tuple[float, Tombstone]] = {}

    @property
    def num_early(self) -> int:
        """Receivers whose prefill request has not come yet."""
        return len(self._early)

    @property
    def num_tombstones(self) -> int:
        """Requests that ended before their receiver came."""
        return len(self._tombstones)

    def keep(self, instance: str, meta: Meta) -> bool:
        """Let a Meta wait for its request; one that waits already goes on waiting. False when too many do."""
        if meta.key in self._early:
            return True
        num_pages = _num_pages(meta)
        if len(self._early) >= MAX_EARLY or self._num_pages + num_pages > MAX_EARLY_PAGES:
            return False
        self._num_pages += num_pages
        self._early[meta.key] = EarlyTransferInfo(self._clock.now() + self._timeout_s, instance, meta)
        return True

    def take_room(self, room: int) -> list[EarlyTransferInfo]:
        """Whoever waits for `room`, which opens now."""
        keys = [key for key in self._early if key.room == room]
        return [self._take(key) for key in keys]

    def forget_key(self, key: MemoryKey) -> None:
        """Its receiver does not want it any more."""
        if key in self._early:
            self._take(key)

    def forget_peer(self, instance: str) -> None:
        """The receiver's process is dead."""
        for key in [key for key, early in self._early.items() if early.instance == instance]:
            self._take(key)

    def bury(self, room: int, digest: str, verdict: Tombstone) -> None:
        """A request ended, or went elsewhere, before its receiver was known."""
        self._tombstones.pop((room, digest), None)
        self._tombstones[room, digest] = (self._clock.now() + self._timeout_s, verdict)
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def exhume(self, room: int, digest: str) -> Tombstone | None:
        """What became of the request of this room and prompt, told once; None when there is no tombstone."""
        entry = self._tombstones.pop((room, digest), None)
        return None if entry is None else entry[1]

    def expire(self) -> list[EarlyTransferInfo]:
        """Drop what has waited too long; the early ones of it are returned."""
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
        self._num_pages -= _num_pages(early.meta)
        return early


def _num_pages(meta: Meta) -> int:
    return sum(map(len, meta.pages))
