"""Receiving engines, one for each session with a sender, and the fences that end them. Scheduler thread only.

    open   ─> every rank opens an engine for the session   ─> opened: the addresses go into our Hello
    allow  ─> every engine accepts connections from more addresses of the peer's hosts
    fence  ─> every rank destroys that engine              ─> fenced: writes of that session cannot land any more

A rank that cannot confirm a fence (`shm`, while the sender's process lives) repeats it after `RETRY_S`. Owned by
`KVManager`; `Sessions` opens receivers and fences them when a session ends, and `ReceiveSide` frees the fenced pages.
"""

from __future__ import annotations

import dataclasses
import itertools

from pdserve.base.clock import Clock
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyEngine, PeerFenced, ReceiverOpened
from pdserve.transfer.wire import Hello

RETRY_S = 1.0
"""Seconds after an unconfirmed fence until the rank is fenced again."""


@dataclasses.dataclass(slots=True)
class _Receiver:
    """The engines of one session, by rank."""

    addresses: dict[int, str] = dataclasses.field(default_factory=dict)
    fence_begun_at: float | None = None
    asked: set[int] = dataclasses.field(default_factory=set)
    """Ranks whose answer to the fence is pending."""
    again: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks that did not confirm the fence, and when to repeat it."""
    free_at: float | None = None
    """Time from which no write can land; None: some rank is not fenced."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiverAddresses:
    """All ranks opened an engine for the session `name` (one address each), or one rank failed."""

    name: str
    addresses: tuple[str, ...]
    failure: Failure | None = None


class SessionReceivers:
    """Receiving engines of all sessions. A name is used for one session only."""

    def __init__(self, engine: CopyEngine, clock: Clock, num_ranks: int) -> None:
        self._engine = engine
        self._clock = clock
        self._num_ranks = num_ranks
        self._receivers: dict[str, _Receiver] = {}

    def open(self, name: str, endpoint: str) -> None:
        """Open an engine for session `name` with the peer at `endpoint` on every rank.

        `opened` returns the addresses when all ranks have one. The engines accept connections from the endpoint's host.
        """
        assert name not in self._receivers, name
        self._receivers[name] = _Receiver()
        for rank in range(self._num_ranks):
            self._engine.open_receiver(rank, name)
        self._allow(name, (endpoint.rpartition(":")[0].strip("[]"),))

    def allow(self, name: str, source: str, answer: Hello) -> None:
        """Accept connections of session `name` from the hosts of the peer's ranks, and from `source`.

        The peer's handshake `answer` came from there. That address differs where the peer is behind NAT. Engines use a
        bounded number of addresses, so the first address of every rank comes before the second of any.
        """
        receiver = self._receivers.get(name)
        if receiver is not None and receiver.fence_begun_at is None:
            by_place = itertools.zip_longest(*(rank.host_addresses for rank in answer.ranks), fillvalue="")
            self._allow(name, (source, *itertools.chain.from_iterable(by_place)))

    def opened(self, event: ReceiverOpened) -> ReceiverAddresses | None:
        """Apply one rank's result. Repeated reports, and reports for ended sessions, return None."""
        receiver = self._receivers.get(event.peer)
        if receiver is None or receiver.fence_begun_at is not None or event.rank in receiver.addresses:
            return None
        if event.failure is not None:
            return ReceiverAddresses(event.peer, (), event.failure)
        receiver.addresses[event.rank] = event.transport_address
        if len(receiver.addresses) < self._num_ranks:
            return None
        return ReceiverAddresses(event.peer, tuple(receiver.addresses[rank] for rank in range(self._num_ranks)))

    def fence(self, name: str) -> None:
        """Fence session `name` on every rank. Unknown names, and sessions that are being fenced, are ignored."""
        receiver = self._receivers.get(name)
        if receiver is None or receiver.fence_begun_at is not None:
            return
        receiver.fence_begun_at = self._clock.now()
        receiver.asked = set(range(self._num_ranks))
        for rank in range(self._num_ranks):
            self._engine.fence(rank, name)

    def fenced(self, event: PeerFenced) -> list[str]:
        """Apply one rank's answer to a fence; return the sessions whose writes cannot land any more."""
        receiver = self._receivers.get(event.peer)
        if receiver is None or event.rank not in receiver.asked:
            return []
        receiver.asked.remove(event.rank)
        now = self._clock.now()
        if not event.fenced:
            receiver.again[event.rank] = now + RETRY_S
        elif not receiver.asked and not receiver.again:
            receiver.free_at = now + self._engine.fence_drain_timeout_s
        return self._take_free(now)

    def tick(self) -> list[str]:
        """Repeat unconfirmed fences; return the sessions whose writes cannot land any more."""
        now = self._clock.now()
        for name, receiver in self._receivers.items():
            for rank in [rank for rank, at in receiver.again.items() if now >= at]:
                del receiver.again[rank]
                receiver.asked.add(rank)
                self._engine.fence(rank, name)
        return self._take_free(now)

    def forget(self, name: str) -> None:
        """Stop waiting for a fence: the sender promised to write no more, or an operator declared it dead."""
        self._receivers.pop(name, None)

    def is_fencing(self, name: str) -> bool:
        """True from `fence` until writes of that session cannot land any more."""
        receiver = self._receivers.get(name)
        return receiver is not None and receiver.fence_begun_at is not None

    @property
    def num_fencing(self) -> int:
        """Number of ended sessions whose senders may still write."""
        return sum(receiver.fence_begun_at is not None for receiver in self._receivers.values())

    def _allow(self, name: str, addresses: tuple[str, ...]) -> None:
        known = tuple(dict.fromkeys(address for address in addresses if address))
        for rank in range(self._num_ranks):
            self._engine.allow_sources(rank, name, known)

    def _take_free(self, now: float) -> list[str]:
        free = [name for name, it in self._receivers.items() if it.free_at is not None and now >= it.free_at]
        for name in free:
            del self._receivers[name]
        return free
