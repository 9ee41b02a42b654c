"""Pages whose addresses a peer knows, by key: kept until nothing can be written there, whatever became of the request.

They have the hold `remote`. It drops when the sender has said its last word of the key (Done, or a quiesced Ended) and
all that it had written is there; when the session with the sender has ended and is fenced (`receivers`); or when a
write is missing, and what may be in flight has drained.

Whether it is there is said by the engine of each rank, where engines notify. Called by `ReceiveSide`.
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
    """Whom they were given to; no other process can say how the key ended."""
    receiver: str | None
    """Our receiving engines of the session; its fence ends what the peer writes."""
    leases: tuple[Lease, ...]
    num_pages: int
    """KV pages and aux slots that the peer was told; a lease may have more, which it must not touch."""
    cached_tokens: int = 0
    """Of the Meta."""
    fenced_at: float | None = None
    """The time from which nothing of a write that was not notified is in flight any more; None: not known."""
    word: Done | Ended | None = None
    """The sender's last: it writes no more."""
    orphan_at: float | None = None
    """When it was seen first that no request has the pages any more; None: one has."""
    at_ranks: list[KVPoll] = dataclasses.field(default_factory=list)
    """Since then: whether what it wrote is there at each of our ranks; one for all where engines notify of nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class WritableEnd:
    """How a key ended: the sender's last word, and whether all that it had written is there at all ranks."""

    entry: RemoteWritable
    word: Done | Ended
    landed: bool


class RemoteWritablePages:
    """All keys that peers may write to. `num_ranks`: those of our replica."""

    def __init__(self, engine: CopyEngine, clock: Clock, num_ranks: int) -> None:
        self._engine = engine
        self._clock = clock
        self._num_notified = num_ranks if engine.notifies else 0
        """Ranks that a last word must say something of."""
        self._entries: dict[MemoryKey, RemoteWritable] = {}
        self._fenced: dict[MemoryKey, RemoteWritable] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RemoteWritable]:
        return iter(self._entries.values())

    def get(self, key: MemoryKey) -> RemoteWritable | None:
        """What was published under `key`, while it is."""
        return self._entries.get(key)

    def add(self, entry: RemoteWritable) -> None:
        """The peer is about to be told; from here on the pages have the hold `remote`."""
        for lease in entry.leases:
            lease.hold("remote")
        self._entries[entry.key] = entry

    def release(self, key: MemoryKey) -> None:
        """Nothing can be written any more. Unknown keys are ignored."""
        self._fenced.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None:
            for lease in entry.leases:
                lease.drop("remote")

    def end(self, word: Done | Ended) -> WritableEnd | None:
        """The sender writes no more of a key. What has come of that, unless our engines must be waited for.

        The first word counts: a quiesced `Ended` may come with a `Done`, in any order.
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
        """The engine of one of our ranks has been notified of all that was written of a key, or will not be."""
        entry = self._entries.get(event.key)
        if entry is None or entry.word is None or entry.at_ranks[event.rank] is not KVPoll.TRANSFERRING:
            return None
        entry.at_ranks[event.rank] = KVPoll.FAILED if event.num_missing else KVPoll.SUCCESS
        return self._ending(entry)

    def fenced(self, receiver: str) -> None:
        """Nothing can land any more of what was published in the session with these receiving engines."""
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            self.release(entry.key)

    def quiesced(self, receiver: str) -> None:
        """The sender writes no more in that session.

        Where engines notify, bytes that were taken from the sender may still come.
        """
        for entry in [entry for entry in self._entries.values() if entry.receiver == receiver]:
            if self._engine.notifies:
                self._fence(entry, self._engine.drain_timeout_s)
            else:
                self.release(entry.key)

    def oldest_orphan_s(self) -> float:
        """How many seconds pages that no request has any more are kept for a peer; 0.0 where there are none."""
        now = self._clock.now()
        for entry in self._entries.values():
            if entry.orphan_at is None and not any(lease.held_by("request") for lease in entry.leases):
                entry.orphan_at = now
        since = [entry.orphan_at for entry in self._entries.values() if entry.orphan_at is not None]
        return now - min(since, default=now)

    def tick(self) -> None:
        """Let go of pages whose last bytes have drained."""
        now = self._clock.now()
        for entry in [entry for entry in self._fenced.values() if entry.fenced_at is None or now >= entry.fenced_at]:
            self.release(entry.key)

    def _at_rank(self, key: MemoryKey, rank: int, num_written: int) -> KVPoll:
        """How a key stands at one of our ranks that so many writes of it went to."""
        if not num_written or self._engine.expect(key, rank, num_written):
            return KVPoll.SUCCESS
        return KVPoll.TRANSFERRING

    def _ending(self, entry: RemoteWritable) -> WritableEnd | None:
        """A key stands as the slowest rank does, once all have said their word. Then its pages are let go; but where
        one was not told of a write, its bytes may still come, and the pages rest.
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
        """Keep the pages of a key for so long, or for as long as was said before."""
        until = self._clock.now() + drain_timeout_s
        entry.fenced_at = until if entry.fenced_at is None else max(entry.fenced_at, until)
        self._fenced[entry.key] = entry
