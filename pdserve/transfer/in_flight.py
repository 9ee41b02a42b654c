"""What `SendSide` keeps beside its rooms: writes in flight, connections to peers, and early arrivals.

`OutgoingKeys` tracks the writes of each key until the last one has ended, also after the request has ended. Until then
the source pages keep the hold `send`. It drops when the last job of the key has ended and failed writes have drained.
Then `OutgoingKeys` sends the final message of the key to the receiver. It sends `TransferEnded(quiesced=True)` only
when no write of the key can still run.

`EarlyArrivals` has receivers and requests that have not met: early `TransferInfo` messages, and tombstones.

Owned by `SendSide`; scheduler thread only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pdserve.base.clock import Clock
from pdserve.memory.layer_events import LayerEvents
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyDone, CopyEngine, CopyJob, PeerConnected
from pdserve.transfer.peers import Peer, PeerState
from pdserve.transfer.plan import ChunkPart, RankPair
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import (
    Hello,
    MemoryKey,
    PromptLogprobsPart,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
)


@dataclasses.dataclass(slots=True)
class InFlightWrites:
    """Writes of one key that may still run."""

    key: MemoryKey
    peer: str
    session: int
    """Session in which the receiver published its pages; the end of the key is sent only in that session."""
    leases: list[Lease] = dataclasses.field(default_factory=list)
    pending: dict[int, CopyJob] = dataclasses.field(default_factory=dict)
    num_jobs: int = 0
    sealed_at: float | None = None
    """When the last job was submitted; None before."""
    times: TransferStats = TransferStats()
    failure: Failure | None = None
    drained_at: float = 0.0
    num_bytes: int = 0
    num_pages: int = 0
    num_logprob_parts: int = 0
    write_s: float = 0.0
    num_written: Counter[str] = dataclasses.field(default_factory=Counter)
    """Successful non-empty jobs, by destination address."""


@dataclasses.dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Effect of a job's end on its request: all data has landed (`TransferStats`), or writing stops (`Failure`)."""

    key: MemoryKey
    how: TransferStats | Failure


class ClosedKeys:
    """Keys that never reopen, and the number of notified writes of each.

    The newest `limit` keys are remembered, far more than can be in flight at once.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._keys: OrderedDict[MemoryKey, tuple[int, ...]] = OrderedDict()
        self._limit = limit

    def add(self, key: MemoryKey, notified: tuple[int, ...] = ()) -> None:
        """Close `key` for good, perhaps before its last write has ended: `notified` may be set by a later call."""
        self._keys[key] = notified or self._keys.get(key, ())
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def notified(self, key: MemoryKey) -> tuple[int, ...]:
        """Return the numbers for `TransferEnded.notified`."""
        return self._keys.get(key, ())

    def __contains__(self, key: MemoryKey) -> bool:
        return key in self._keys


class OutgoingKeys:
    """Tracks the copy jobs of each transfer key. It sends `TransferDone` or `TransferEnded` after the last job.

    It also reports a failed copy at once, with `quiesced` False. `SendSide` sends `TransferEnded` for a key that it
    refuses, or that the receiver aborts before the first job.
    """

    def __init__(self, sessions: Sessions, engine: CopyEngine, clock: Clock, counters: Counter[str]) -> None:
        self._sessions = sessions
        self._engine = engine
        self._clock = clock
        self._counters = counters
        self._entries: dict[MemoryKey, InFlightWrites] = {}
        self._draining: dict[MemoryKey, InFlightWrites] = {}
        """Keys with a failed write that may still land."""
        self._num_readers = Counter[Lease]()
        """Keys that read from each lease: the stages of a migration, and its end, read from the same one."""
        self.closed = ClosedKeys()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[InFlightWrites]:
        return iter(self._entries.values())

    def __contains__(self, key: MemoryKey) -> bool:
        return key in self._entries

    def get(self, key: MemoryKey) -> InFlightWrites | None:
        """Return the writes of `key`; None when none may run."""
        return self._entries.get(key)

    def submit(
        self, key: MemoryKey, peer: Peer, leases: Sequence[Lease], part: ChunkPart, layer_events: LayerEvents
    ) -> None:
        """Queue the copies of `part`, which read from pages of `leases`: held until the key's last job has ended."""
        out = self._entries.get(key)
        if out is None:
            out = self._entries[key] = InFlightWrites(key, peer.instance, peer.session)
        for lease in leases:
            if lease not in out.leases:
                lease.hold("send")
                out.leases.append(lease)
                self._num_readers[lease] += 1
        job = CopyJob(
            key, out.num_jobs, peer.instance, part.transport_address, part.pieces, part.num_bytes,
            layer_events, part.num_layers, rank=part.rank,
        )  # fmt: skip
        out.pending[job.index] = job
        out.num_jobs += 1
        self._engine.submit(job)

    def notify_receiver(self, key: MemoryKey, body: TransferEnded | TransferDone | PromptLogprobsPart) -> None:
        """Send `body` to the receiver of `key`, if its session exists; after a write, only in the session of that
        write.
        """
        peer, out = self._sessions.peer(key.origin, dialled=False), self._entries.get(key)
        if out is not None:
            peer = self._receiver_of(out)
        if peer is not None and peer.hello is not None and peer.state is not PeerState.REFUSED:
            self._sessions.send(peer, body)

    def stop(self, key: MemoryKey, failure: Failure) -> None:
        """Stop writing for `key`, and send the `quiesced` promise once no write runs."""
        out = self._entries.get(key)
        if out is None:
            self.closed.add(key)
            self.notify_receiver(key, self.quiesced(key, failure))
            return
        out.failure = out.failure or failure
        for job in out.pending.values():
            job.cancelled = True
            self._engine.cancel(job)
        self._finish(out)

    def quiesced(self, key: MemoryKey, failure: Failure) -> TransferEnded:
        """Return the promise that nothing is written any more to `key`, which is closed."""
        return TransferEnded(key=key, failure=failure, quiesced=True, notified=self.closed.notified(key))

    def copied(self, event: CopyDone) -> WriteOutcome | None:
        """Apply the end of a job. Repeated reports are ignored."""
        out = self._entries.get(event.key)
        job = None if out is None else out.pending.pop(event.index, None)
        if out is None or job is None:
            return None
        out.write_s += event.write_s
        if event.failure is None:
            self._count(out, job, event.write_s)
            return self._finish(out)
        self._counters["copies_failed"] += not job.cancelled
        if not event.settled:
            out.drained_at = max(out.drained_at, self._clock.now() + self._engine.drain_timeout_s)
            self._draining[out.key] = out
        if out.failure is not None:
            return self._finish(out)
        self.notify_receiver(out.key, TransferEnded(key=out.key, failure=event.failure, quiesced=False))
        self.stop(out.key, event.failure)
        return WriteOutcome(out.key, event.failure)

    def tick(self) -> None:
        """Finish keys whose failed writes have drained."""
        for out in list(self._draining.values()):
            self._finish(out)

    def writes_in(self, session: int) -> bool:
        """True when pages that were published in that session may still be written."""
        return any(out.session == session for out in self._entries.values())

    @property
    def num_held_pages(self) -> int:
        """Number of KV pages and aux slots that may be read for peers."""
        return sum(len(lease.pages) for lease in self._num_readers)

    def _count(self, out: InFlightWrites, job: CopyJob, write_s: float) -> None:
        """Count a successful job."""
        out.num_bytes += job.num_bytes
        out.num_written[job.transport_address] += job.num_bytes > 0
        peer = self._sessions.peer(out.peer, dialled=False)
        if peer is not None:
            peer.sent.moved(job.num_bytes, write_s, self._clock.now())
        self._counters["kv_transfer_bytes"] += job.num_bytes

    def _finish(self, out: InFlightWrites) -> WriteOutcome | None:
        """After the last write of a key has ended, send the final message and drop the hold on the source pages."""
        if out.pending or self._clock.now() < out.drained_at:
            return None
        if out.failure is None and out.sealed_at is None:
            return None
        del self._entries[out.key]
        self._draining.pop(out.key, None)
        for lease in out.leases:
            self._num_readers[lease] -= 1
            if not self._num_readers[lease]:
                del self._num_readers[lease]
                lease.drop("send")
        peer = self._receiver_of(out)
        notified = self._notified(out, peer)
        self.closed.add(out.key, notified)
        if peer is not None:
            peer.sent.ended(well=out.failure is None)
        if out.failure is not None:
            if peer is not None:
                self._sessions.send(peer, self.quiesced(out.key, out.failure))
            return None
        stats = self._stats(out)
        self._counters["transfers_done"] += 1
        if peer is not None:
            done = TransferDone(key=out.key, stats=stats, num_logprob_parts=out.num_logprob_parts, notified=notified)
            self._sessions.send(peer, done)
        return WriteOutcome(out.key, stats)

    def _receiver_of(self, out: InFlightWrites) -> Peer | None:
        """Return the receiver of a key; None when the session in which it published its pages has ended."""
        peer = self._sessions.peer(out.peer, dialled=False)
        if peer is None or peer.session != out.session or peer.hello is None or peer.state is PeerState.REFUSED:
            return None
        return peer

    def _notified(self, out: InFlightWrites, peer: Peer | None) -> tuple[int, ...]:
        """Return the numbers for `TransferDone.notified`."""
        if not self._engine.notifies or peer is None or peer.hello is None:
            return ()
        return tuple(out.num_written[rank.transport_address] for rank in peer.hello.ranks)

    def _stats(self, out: InFlightWrites) -> TransferStats:
        return msgspec.structs.replace(
            out.times,
            num_bytes=out.num_bytes,
            num_pages=out.num_pages,
            write_s=out.write_s,
            tail_s=0.0 if out.sealed_at is None else self._clock.now() - out.sealed_at,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectResult:
    """All local ranks reach the peer (`failure` None), or one cannot."""

    peer: str
    failure: Failure | None


class Connecting:
    """Connections to all peers; `rank_pairs` returns the rank pairs of one peer."""

    def __init__(self, engine: CopyEngine, rank_pairs: Callable[[Hello], Sequence[RankPair]]) -> None:
        self._engine = engine
        self._rank_pairs = rank_pairs
        self._missing: dict[str, set[RankPair]] = {}
        """Rank pairs that are not connected yet, by peer."""
        self._whose: dict[RankPair, str] = {}

    def begin(self, peer: Peer) -> bool:
        """Return whether all local ranks reach `peer`, whose handshake is complete.

        False: a `ConnectResult` follows.
        """
        assert peer.hello is not None
        if peer.instance not in self._missing:
            missing = {pair for pair in self._rank_pairs(peer.hello) if not self._engine.connect(*pair)}
            self._missing[peer.instance] = missing
            self._whose |= dict.fromkeys(missing, peer.instance)
        return not self._missing[peer.instance]

    def take(self, event: PeerConnected) -> ConnectResult | None:
        """Apply one rank pair's result; return the peer's result when it is final. A failure makes `begin` connect
        again.
        """
        pair = (event.rank, event.transport_address)
        peer = self._whose.pop(pair, None)
        missing = None if peer is None else self._missing.get(peer)
        if peer is None or missing is None:
            return None
        missing.discard(pair)
        if event.failure is not None:
            self.forget(peer)
            return ConnectResult(peer, event.failure)
        return None if missing else ConnectResult(peer, None)

    def forget(self, peer: str) -> None:
        """Forget a peer that is gone, or has an unreachable rank."""
        for pair in self._missing.pop(peer, ()):
            self._whose.pop(pair, None)


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

    def forget_all(self) -> None:
        """Drop all early messages."""
        for key in list(self._early):
            self._take(key)

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
