"""Copy engine of one rank: runs the submitted jobs that read this rank's pages, and keeps outcomes until all ranks
agree.

The ranks agree in `consensus`. Created by `engine` in each rank's process.
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
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey


class Opening(msgspec.Struct, frozen=True):
    """A receiving engine that is being opened for the session `name`."""

    name: str


class Fencing(msgspec.Struct, frozen=True):
    """The fence of the session `name`."""

    name: str


Item = tuple[MemoryKey | Opening | Fencing | str, int]
"""A pending item: a copy job by its index; `-1 - r` for the notifications that rank r expects; an address that rank r
connects to; or a receiving engine that rank r opens or fences.
"""
Outcome = PeerConnected | CopyDone | Notified | ReceiverOpened | PeerFenced
Report = Callable[[Outcome], None]

LOST = Failure(code="transfer_failed", message="another rank failed; see its log", status=502)
_LATER = torch.iinfo(torch.int64).max
"""A rank's value for an item of another rank: the maximum, so that MIN keeps the owner's value."""


class RankCopies:
    """Implements `CopyEngine` for rank `rank` over an engine that is set later (`drive`).

    All ranks have the same pending items, since their schedulers make the same calls.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._report: Report = lambda event: None
        self._own: CopyEngine | None = None
        self._lock = threading.RLock()
        self._pending: dict[Item, int] = {}
        """Rank of each item, in the order of submission."""
        self._together: dict[MemoryKey | Opening | Fencing | str, set[Item]] = {}
        """The same items, grouped by key, address or session."""
        self._outcomes: dict[Item, Outcome] = {}
        """Outcomes of own items, until all ranks agree."""
        self._reasons: dict[Item, Failure] = {}
        """Failures of other ranks' items, as far as reported."""
        self._addresses: dict[Item, str] = {}
        """Addresses of other ranks' receiving engines, as far as reported. Used by rank 0 only."""
        self.drain_timeout_s = 0.0
        self.fence_drain_timeout_s = 0.0

    def drive(self, own: CopyEngine, drain_timeout_s: float, fence_drain_timeout_s: float, report: Report) -> None:
        """Copy with `own`, which must report to `post`. Call once, before the first submission.

        `report` gets the outcome of each own item, on any thread. `drain_timeout_s` and `fence_drain_timeout_s` are the
        longest of all ranks: every rank must free pages in the same turn, and no rank before its transport's writes
        have drained.
        """
        self._own, self._report = own, report
        self.drain_timeout_s, self.fence_drain_timeout_s = drain_timeout_s, fence_drain_timeout_s

    @property
    def notifies(self) -> bool:
        """See `CopyEngine`: all ranks have the same transport."""
        return self._engine.notifies

    @property
    def num_pending(self) -> int:
        """Number of items that the ranks have not agreed on; the same on all ranks."""
        return len(self._pending)

    @property
    def num_reports(self) -> int:
        """Reports that are kept for items on which the ranks have not agreed yet; this rank's own and others'."""
        return len(self._outcomes) + len(self._reasons) + len(self._addresses)

    def connect(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`. Always False: a result that only this rank knows needs the agreement of all ranks first."""
        if (transport_address, rank) in self._pending:
            return False  # pending from an earlier call whose caller has given up
        self._add((transport_address, rank), rank)
        if rank == self._rank and self._engine.connect(0, transport_address):
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
        """See `CopyEngine`. Only rank 0 gets the addresses of other ranks; on followers they are empty."""
        self._add((Opening(peer), rank), rank)
        if rank == self._rank:
            self._engine.open_receiver(0, peer)

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """See `CopyEngine`."""
        if rank == self._rank:
            self._engine.allow_sources(0, peer, addresses)

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._add((Fencing(peer), rank), rank)
        if rank == self._rank:
            self._engine.fence(0, peer)

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`; as `connect`."""
        self._add((key, -1 - rank), rank)
        if rank == self._rank and self._engine.expect(key, 0, count):
            self.post(Notified(key, 0))
        return False

    def post(self, event: TransferEvent) -> None:
        """Handle the engine's report on an own item. Any thread."""
        assert isinstance(event, Outcome), event
        if not isinstance(event, CopyDone):
            event = msgspec.structs.replace(event, rank=self._rank)
        item = item_of(event)
        with self._lock:  # record and report atomically: `poll` and `report` must agree
            if item in self._pending:
                self._outcomes[item] = event
                self._report(event)

    def heard(self, event: Outcome) -> None:
        """Record another rank's report: the reason of a failure, or an address. The outcome itself needs consensus. Any
        thread.
        """
        failure = failure_of(event)
        with self._lock:
            if failure is not None:
                self._reasons[item_of(event)] = failure
            if isinstance(event, ReceiverOpened):
                self._addresses[item_of(event)] = event.transport_address

    def all_ended(self, ended: Container[Item], of: MemoryKey | Opening | Fencing | str | None = None) -> bool:
        """Return whether all items of one transfer are in `ended`: of any transfer, or only of `of`. Any thread."""
        with self._lock:
            some = self._together.values() if of is None else [self._together.get(of, set())]
            return any(items and all(item in ended for item in items) for items in some)

    def poll(self) -> tuple[Sequence[Item], Tensor]:
        """Return the pending items and their state, int64 `[items, 3]`.

        Columns: a `KVPoll`; whether an end is settled; the negative duration of the copy in microseconds. MIN over the
        ranks is the value of the item's own rank.
        """
        with self._lock:
            values = [
                _values_of(self._outcomes.get(item)) if rank == self._rank else self._of_another(item)
                for item, rank in self._pending.items()
            ]
        return list(self._pending), torch.tensor(values, dtype=torch.int64)

    def agreed(self, items: Sequence[Item], values: Tensor) -> list[Outcome]:
        """Apply the reduced `values` of `items` from `poll`: remove the items that have ended, and return their
        outcomes.

        The outcomes are the same on all ranks, except the texts of failures, which only rank 0 has.
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
                self._reasons.clear()  # late reports; addresses are kept, since they are never late and may be early
        return ended

    def _of_another(self, item: Item) -> tuple[int, int, int]:
        """Return our value for another rank's item. Rank 0 reports TRANSFERRING until it has a receiving engine's
        address.
        """
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
        assert self._own is not None, "no copy engine is set"
        return self._own


def item_of(event: Outcome) -> Item:
    """Return the item of an outcome."""
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
    """Return the failure of an outcome; None on success, and for outcomes that encode failure in another field."""
    return None if isinstance(event, Notified | PeerFenced) else event.failure


def _values_of(outcome: Outcome | None) -> tuple[int, int, int]:
    """Return the values of an item at its own rank; see `RankCopies.poll`."""
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
