"""Pages whose addresses a peer knows, by key, kept until no write can land there, independent of the request.

They have the hold `remote`. It drops in one of three cases. The sender has sent its final message for the key (Done, or
a quiesced Ended) and all its writes have landed. The session with the sender has ended and is fenced
(`receiving_engines`). A write is missing, and writes in flight have drained.

Where engines notify, the engine of each rank confirms that writes have landed. Called by `ReceiveSide`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pdserve.base.clock import Clock
from pdserve.memory.lease import Lease
from pdserve.transfer.events import CopyEngine, Notified
from pdserve.transfer.state import KVPoll, merge_ranks
from pdserve.transfer.wire import Done, Ended, MemoryKey


@dataclasses.dataclass(slots=True)
class RemoteWritable:
    """The pages of one key."""

    key: MemoryKey
    peer: str
    """Instance id of the sender; no other process can end the key."""
    receiver: str | None
    """Our receiving engines of the session; their fence ends the peer's writes. None: no engines."""
    leases: tuple[Lease, ...]
    num_pages: int
    """KV pages and aux slots that were sent to the peer; a lease may have more, which the peer must not write."""
    cached_tokens: int = 0
    """`Meta.cached_tokens`."""
    fenced_at: float | None = None
    """Time from which no write without a notification is in flight any more; None: not known."""
    word: Done | Ended | None = None
    """The sender's final message, after which it writes no more; None before."""
    orphan_at: float | None = None
    """When the pages were first seen without a request; None: a request has them."""
    at_ranks: list[KVPoll] = dataclasses.field(default_factory=list)
    """Since `word`: whether the writes have landed, for each local rank; one entry for all where engines do not notify.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class WritableEnd:
    """End of a key: the sender's final message, and whether all its writes have landed at all ranks."""

    entry: RemoteWritable
    word: Done | Ended
    landed: bool


class RemoteWritablePages:
    """All keys that peers may write to. `num_ranks` counts the ranks of this replica."""

    def __init__(self, engine: CopyEngine, clock: Clock, num_ranks: int) -> None:
        self._engine = engine
        self._clock = clock
        self._num_notified = num_ranks if engine.notifies else 0
        """Ranks for which a final message must give a number of writes."""
        self._entries: dict[MemoryKey, RemoteWritable] = {}
        self._fenced: dict[MemoryKey, RemoteWritable] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RemoteWritable]:
        return iter(self._entries.values())

    def get(self, key: MemoryKey) -> RemoteWritable | None:
        """Return what is published under `key`; None when nothing is."""
        return self._entries.get(key)

    def add(self, entry: RemoteWritable) -> None:
        """Set the hold `remote` on pages that are about to be published."""
        for lease in entry.leases:
            lease.hold("remote")
        self._entries[entry.key] = entry

    def release(self, key: MemoryKey) -> None:
        """Free the pages of a key to which no write can land any more. Unknown keys are ignored."""
        self._fenced.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None:
            for lease in entry.leases:
                lease.drop("remote")

    def end(self, word: Done | Ended) -> WritableEnd | None:
        """Apply the sender's final message; return the end of the key, or None while engines must be waited for.

        The first message counts: a quiesced `Ended` may come with a `Done`, in any order.
        """
        entry = self._entries.get(word.key)
        if entry is None or entry.word is not None:
            return None
        entry.word = word
        if len(word.notified) == self._num_notified or (isinstance(word, Ended) and not word.notified):
            states = [self._at_rank(word.key, rank, count) for rank, count in enumerate(word.notified)]
            entry.at_ranks = states or [KVPoll.SUCCESS]
        else:
            entry.at_ranks = [KVPoll.FAILED]
        return self._ending(entry)

    def notified(self, event: Notified) -> WritableEnd | None:
        """Apply an engine's report that, at one local rank, all writes of a key have landed, or that some did not in
        time.
        """
        entry = self._entries.get(event.key)
        if entry is None or entry.word is None or entry.at_ranks[event.rank] is not KVPoll.TRANSFERRING:
            return None
        entry.at_ranks[event.rank] = KVPoll.FAILED if event.num_missing else KVPoll.SUCCESS
        return self._ending(entry)

    def fenced(self, receiver: str) -> None:
        """Free the pages published in the session of `receiver`: writes cannot land there any more."""
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            self.release(entry.key)

    def quiesced(self, receiver: str) -> None:
        """Handle the sender's promise to write no more in the session of `receiver`.

        Where engines notify, bytes that have left the sender may still land.
        """
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            if self._engine.notifies:
                self._fence(entry, self._engine.drain_timeout_s)
            else:
                self.release(entry.key)

    def oldest_orphan_s(self) -> float:
        """Age in seconds of the oldest pages that are kept for a peer without a request; 0.0 when there are none."""
        now = self._clock.now()
        for entry in self._entries.values():
            if entry.orphan_at is None and not any(lease.held_by("request") for lease in entry.leases):
                entry.orphan_at = now
        since = [entry.orphan_at for entry in self._entries.values() if entry.orphan_at is not None]
        return now - min(since, default=now)

    def tick(self) -> None:
        """Free pages whose writes in flight have drained."""
        now = self._clock.now()
        for entry in [entry for entry in self._fenced.values() if entry.fenced_at is None or now >= entry.fenced_at]:
            self.release(entry.key)

    def _at_rank(self, key: MemoryKey, rank: int, num_written: int) -> KVPoll:
        """Return the state of a key at one local rank, to which `num_written` writes went."""
        if not num_written or self._engine.expect(key, rank, num_written):
            return KVPoll.SUCCESS
        return KVPoll.TRANSFERRING

    def _ending(self, entry: RemoteWritable) -> WritableEnd | None:
        """Return the end of a key once all ranks have reported; the slowest rank decides.

        Its pages are freed then. Where a rank misses a notification, bytes may still land, and the pages drain first.
        """
        assert entry.word is not None
        if KVPoll.TRANSFERRING in entry.at_ranks:
            return None
        landed = merge_ranks(entry.at_ranks) is KVPoll.SUCCESS
        if landed:
            self.release(entry.key)
        else:
            self._fence(entry, self._engine.drain_timeout_s)
        return WritableEnd(entry, entry.word, landed)

    def _fence(self, entry: RemoteWritable, drain_timeout_s: float) -> None:
        """Keep the pages of a key for at least `drain_timeout_s` seconds from now."""
        until = self._clock.now() + drain_timeout_s
        entry.fenced_at = until if entry.fenced_at is None else max(entry.fenced_at, until)
        self._fenced[entry.key] = entry
