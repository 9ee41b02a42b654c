"""A rank's copy engine: of all jobs that the scheduler submits, it runs those out of this rank's pages, and keeps what
has become of them until all ranks agree on it (`consensus`).

Made by the composition root of each rank's process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence

import msgspec
import torch
from torch import Tensor

from pdserve.protocol.failure import Failure
from pdserve.transfer.events import (
    CopyDone,
    CopyEngine,
    CopyJob,
    Notified,
    PeerConnected,
    PeerFenced,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import MemoryKey


class Opening(msgspec.Struct, frozen=True):
    """A receiving engine that is being opened for the session `name`."""

    name: str


class Fencing(msgspec.Struct, frozen=True):
    """The fence of the session `name`."""

    name: str


Item = tuple[MemoryKey | Opening | Fencing | str, int]
"""A copy job by its index; what rank r expects to be notified of, `-1 - r`; an address that rank r shall reach; or a
receiving engine that rank r opens or ends."""
Outcome = PeerConnected | CopyDone | Notified | ReceiverOpened | PeerFenced
Tell = Callable[[Outcome], None]

LOST = Failure(code="transfer_failed", message="a rank could not; its own log says why", status=502)
_LATER = torch.iinfo(torch.int64).max
"""What a rank says of another's items: no less than what that one says."""


class RankCopies:
    """Implements `CopyEngine` for rank `rank` over an engine that is told later (`drive`).

    All ranks have the same items pending, for their schedulers submit and expect the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tell: Tell = lambda event: None
        self._own: CopyEngine | None = None
        self._lock = threading.RLock()
        self._pending: dict[Item, int] = {}
        """Whose each is, in the order in which they came."""
        self._together: dict[MemoryKey | Opening | Fencing | str, set[Item]] = {}
        """The same by what they are of."""
        self._outcomes: dict[Item, Outcome] = {}
        """Of own items, until all agree."""
        self._reasons: dict[Item, Failure] = {}
        """Why others' have failed, where that has been heard."""
        self._addresses: dict[Item, str] = {}
        """Of others' receiving engines, where that has been heard. The leader's."""
        self.drain_timeout_s = 0.0
        self.fence_drain_timeout_s = 0.0

    def drive(self, own: CopyEngine, drain_timeout_s: float, fence_drain_timeout_s: float, tell: Tell) -> None:
        """Copy with `own`, which posts to `post`. Once, before anything is submitted.

        `tell` is called with what has become of an own item, on any thread. `drain_timeout_s` and
        `fence_drain_timeout_s` are the longest of all ranks': every rank must free pages at the same turn, and none
        before its transport is still.
        """
        self._own, self._tell = own, tell
        self.drain_timeout_s, self.fence_drain_timeout_s = drain_timeout_s, fence_drain_timeout_s

    @property
    def notifies(self) -> bool:
        """See `CopyEngine`: all ranks have the same transport."""
        return self._engine.notifies

    @property
    def num_pending(self) -> int:
        """Items that the ranks have not agreed on; the same number on all."""
        return len(self._pending)

    def reach(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`. What this rank knows at once, the others do not: they, too, agree first."""
        if (transport_address, rank) in self._pending:
            return False  # asked before, by somebody who has given up
        self._add((transport_address, rank), rank)
        if rank == self._rank and self._engine.reach(0, transport_address):
            self.post(PeerConnected(transport_address, None))
        return False

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        self._add((job.key, job.index), job.rank)
        if job.rank == self._rank:
            self._engine.submit(job)

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        if job.rank == self._rank:
            self._engine.cancel(job)

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`: every rank forgets it."""
        self._engine.forget(transport_address)

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`. The leader alone hears the addresses of other ranks; on followers these are empty."""
        self._add((Opening(peer), rank), rank)
        if rank == self._rank:
            self._engine.open_receiver(0, peer)

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._add((Fencing(peer), rank), rank)
        if rank == self._rank:
            self._engine.fence(0, peer)

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`; as `reach`."""
        self._add((key, -1 - rank), rank)
        if rank == self._rank and self._engine.expect(key, 0, count):
            self.post(Notified(key, 0))
        return False

    def post(self, event: TransferEvent) -> None:
        """What the engine tells of an own item. Any thread."""
        assert isinstance(event, Outcome), event
        if not isinstance(event, CopyDone):
            event = msgspec.structs.replace(event, rank=self._rank)
        item = item_of(event)
        with self._lock:  # nobody polls what has not been told, nor is told what a poll does not find
            if item in self._pending:
                self._outcomes[item] = event
                self._tell(event)

    def heard(self, event: Outcome) -> None:
        """Another rank has told of its own. What counts is what all agree on; but it knows why. Any thread."""
        failure = failure_of(event)
        with self._lock:
            if failure is not None:
                self._reasons[item_of(event)] = failure
            if isinstance(event, ReceiverOpened):
                self._addresses[item_of(event)] = event.transport_address

    def all_ended(self, ended: Container[Item], of: MemoryKey | Opening | Fencing | str | None = None) -> bool:
        """Whether all that is pending of a transfer, or of that one alone, is known to have `ended`. Any thread."""
        with self._lock:
            some = self._together.values() if of is None else [self._together.get(of, set())]
            return any(items and all(item in ended for item in items) for items in some)

    def poll(self) -> tuple[Sequence[Item], Tensor]:
        """What is pending, and int64 `[items, 3]` of it: a `KVPoll`, whether an end is settled, and how long the copy
        took, negative, in microseconds. The least that any rank says is what the item's own rank says.
        """
        with self._lock:
            values = [
                _values_of(self._outcomes.get(item)) if rank == self._rank else self._of_another(item)
                for item, rank in self._pending.items()
            ]
        return list(self._pending), torch.tensor(values, dtype=torch.int64)

    def agreed(self, items: Sequence[Item], values: Tensor) -> list[Outcome]:
        """All ranks say of `items`, which `poll` gave, what `values` say: those that have ended are pending no more.

        The outcomes are the same on all ranks, but for the words of failures, which the leader has.
        """
        ended: list[Outcome] = []
        for item, (state, settled, spent_us) in zip(items, values.tolist(), strict=True):
            if state == KVPoll.TRANSFERRING:
                continue
            with self._lock:
                self._drop(item)
                own, reason = self._outcomes.pop(item, None), self._reasons.pop(item, LOST)
                address = self._addresses.pop(item, "")
            failure = None
            if state == KVPoll.FAILED:
                failure = (None if own is None else failure_of(own)) or reason
            match item:
                case str(reached), rank:
                    ended.append(PeerConnected(reached, failure, rank))
                case Opening(name=name), rank:
                    address = own.transport_address if isinstance(own, ReceiverOpened) else address
                    ended.append(ReceiverOpened(name, address, failure, rank))
                case Fencing(name=name), rank:
                    ended.append(PeerFenced(name, state == KVPoll.SUCCESS, rank))
                case key, index if index < 0:
                    ended.append(Notified(key, int(state == KVPoll.FAILED), -1 - index))
                case key, index:
                    ended.append(CopyDone(key, index, failure, bool(settled), -spent_us / 1e6))
        if not self._pending:
            with self._lock:
                self._reasons.clear()  # those that came too late; an address never does, and may have come early
        return ended

    def _of_another(self, item: Item) -> tuple[int, int, int]:
        """What we say of another rank's item. The leader waits until it has heard the address of a receiving engine."""
        if self._rank == 0 and isinstance(item[0], Opening) and item not in self._addresses:
            return KVPoll.TRANSFERRING, 0, 0
        return _LATER, _LATER, _LATER

    def _add(self, item: Item, rank: int) -> None:
        with self._lock:
            self._pending[item] = rank
            self._together.setdefault(item[0], set()).add(item)

    def _drop(self, item: Item) -> None:
        del self._pending[item]
        left = self._together[item[0]]
        left.remove(item)
        if not left:
            del self._together[item[0]]

    @property
    def _engine(self) -> CopyEngine:
        assert self._own is not None, "nobody copies yet"
        return self._own


def item_of(event: Outcome) -> Item:
    """What it is the outcome of."""
    match event:
        case PeerConnected(transport_address=address, rank=rank):
            return address, rank
        case Notified(key=key, rank=rank):
            return key, -1 - rank
        case ReceiverOpened(peer=peer, rank=rank):
            return Opening(peer), rank
        case PeerFenced(peer=peer, rank=rank):
            return Fencing(peer), rank
        case CopyDone(key=key, index=index):
            return key, index


def failure_of(event: Outcome) -> Failure | None:
    """Why it has not ended well; None also where it says so in another way."""
    return None if isinstance(event, Notified | PeerFenced) else event.failure


def _values_of(outcome: Outcome | None) -> tuple[int, int, int]:
    """What an item's own rank says of it; see `RankCopies.poll`."""
    match outcome:
        case None:
            return KVPoll.TRANSFERRING, 0, 0
        case PeerConnected(failure=failure) | ReceiverOpened(failure=failure):
            return KVPoll.SUCCESS if failure is None else KVPoll.FAILED, 1, 0
        case PeerFenced(fenced=fenced):
            return KVPoll.SUCCESS if fenced else KVPoll.FAILED, 1, 0
        case Notified(num_missing=num_missing):
            return KVPoll.FAILED if num_missing else KVPoll.SUCCESS, 1, 0
        case CopyDone(failure=failure, settled=settled, write_s=write_s):
            return KVPoll.SUCCESS if failure is None else KVPoll.FAILED, int(settled), -round(write_s * 1e6)
