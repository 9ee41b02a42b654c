"""A seeded network, transport and directory on a manual clock.

Everything that may go wrong here goes wrong sometimes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.memory.allocator import PageAllocator
from pdserve.protocol.failure import Failure
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.events import (
    Address,
    CopyDone,
    CopyJob,
    FrameArrived,
    Notified,
    PeerFenced,
    PeerGone,
    PrefillFound,
    PrefillNotFound,
    Reached,
    ReceiverOpened,
)
from pdserve.transfer.gated import CANCELLED, GATE_TIMEOUT_S, NEVER_WRITTEN, PEER_GONE
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities per message, copy or step; `max_delay_s` bounds how late anything is."""

    lost: float = 0.0
    repeated: float = 0.2
    copy_failed: float = 0.0
    note_lost: float = 0.0
    lands_late: bool = False
    """Where the engine notifies: a copy that has ended well is seen some time later only, but before its note."""
    abort: float = 0.0
    kill: float = 0.0
    max_delay_s: float = 2.0


@dataclasses.dataclass(frozen=True)
class Pool:
    """Registered memory, by its address, and who knows which of its pages are free."""

    page_bytes: int
    allocator: PageAllocator


class SimNet:
    """Calls things later, in random order. `dead` endpoints hear nothing; their copies in flight may still land."""

    def __init__(self, seed: int, clock: ManualClock, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.clock = clock
        self.faults = faults
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.mailboxes: dict[str, Mailbox[Event]] = {}
        self.served: dict[Address, tuple[str, str]] = {}
        self.pools: dict[int, Pool] = {}
        self.engines: dict[str, SimCopyEngine] = {}
        self.endpoints: dict[str, str] = {}
        """Where each instance is or was."""

    def later(self, action: Callable[[], None], max_delay_s: float | None = None, *, min_delay_s: float = 0.0) -> None:
        """Run `action` after a random delay."""
        delay_s = min_delay_s + self.rng.uniform(0, self.faults.max_delay_s if max_delay_s is None else max_delay_s)
        heapq.heappush(self._queue, (self.clock.now() + delay_s, next(self._count), action))

    def deliver(self) -> None:
        """Run what is due."""
        while self._queue and self._queue[0][0] <= self.clock.now():
            heapq.heappop(self._queue)[2]()

    @property
    def busy(self) -> bool:
        """True while anything is on its way."""
        return bool(self._queue)

    def post(self, endpoint: str, event: Event) -> None:
        """Post to the mailbox behind `endpoint`, if its process lives."""
        mailbox = self.mailboxes.get(endpoint)
        if mailbox is not None:
            mailbox.post(event)


@dataclasses.dataclass(frozen=True)
class SimSocket:
    """`ControlSocket` over a `SimNet`: late, reordered, repeated, lost."""

    net: SimNet
    endpoint: str

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""
        faults, rng = self.net.faults, self.net.rng
        if rng.random() < faults.lost:
            return
        for _ in range(2 if rng.random() < faults.repeated else 1):
            self.net.later(lambda: self.net.post(endpoint, FrameArrived(frame)))

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""


class SimCopyEngine:
    """`CopyEngine` whose bytes move copy by copy at random moments, from what is in the source at that moment.

    A job with a closed gate is looked at again after random delays. Notifications come some time after their bytes.
    With `fences` a fence ends what a sender writes; else only the death of its process does, as with `shm`.
    """

    fence_settle_s = 0.0

    def __init__(
        self,
        net: SimNet,
        endpoint: str,
        alive: Callable[[str], bool],
        *,
        notifies: bool = False,
        fences: bool = True,
    ) -> None:
        self.notifies = notifies
        self._net = net
        self._endpoint = endpoint
        self._process_lives = alive
        self._fences = fences
        self._receivers: set[str] = set()
        """Addresses that peers can write to."""
        self._notes: dict[Key, set[int]] = defaultdict(set)
        self._expected: dict[Key, int] = {}
        net.engines[endpoint] = self

    @property
    def settle_s(self) -> float:
        """See `CopyEngine`: longer than any delay."""
        return self._net.faults.max_delay_s * 2

    def reach(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`: known some time later."""
        self._report(Reached(transport_address, None if self._alive(transport_address) else PEER_GONE))
        return False

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        expires_at = self._net.clock.now() + GATE_TIMEOUT_S
        self._net.later(lambda: self._start(job, expires_at))

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        address = f"{self._endpoint}/{peer}"
        self._receivers.add(address)
        self._report(ReceiverOpened(peer, address, None))

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        endpoint = self._net.endpoints[peer.partition("#")[0]]
        fenced = self._fences or not self._process_lives(endpoint)
        if fenced:
            self._receivers.discard(f"{self._endpoint}/{peer}")
        self._report(PeerFenced(peer, fenced))

    def _alive(self, address: str) -> bool:
        """Whether bytes can land at the receiving engine behind `address`."""
        endpoint = address.partition("/")[0]
        engine = self._net.engines.get(endpoint)
        return self._process_lives(endpoint) and engine is not None and address in engine._receivers

    def expect(self, key: Key, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        assert key not in self._expected, "expected twice"
        if len(self._notes[key]) >= count:
            return True
        self._expected[key] = count
        self._net.later(lambda: self._give_up(key), min_delay_s=self.settle_s)
        return False

    def _notified(self, key: Key, index: int) -> None:
        self._notes[key].add(index)
        self._look(key)

    def _look(self, key: Key) -> None:
        if len(self._notes[key]) == self._expected.get(key):
            del self._expected[key]
            self._report(Notified(key, 0))

    def _give_up(self, key: Key) -> None:
        count = self._expected.pop(key, 0)
        if count:
            self._report(Notified(key, count - len(self._notes[key])))

    def _start(self, job: CopyJob, expires_at: float) -> None:
        if not self._process_lives(self._endpoint):
            return  # the process is dead, and so are its threads
        if job.cancelled or not self._alive(job.transport_address):
            failure = CANCELLED if job.cancelled else PEER_GONE
            self._report(CopyDone.of(job, failure, settled=True, write_s=0.0))
            return
        if job.ready is not None and not job.ready(0.0):
            if self._net.clock.now() < expires_at:
                soon_s = max(self._net.faults.max_delay_s, 0.001)  # never at once: `deliver` would not end
                self._net.later(lambda: self._start(job, expires_at), soon_s)
            else:
                self._report(CopyDone.of(job, NEVER_WRITTEN, settled=True, write_s=0.0))
            return
        if self._net.rng.random() < self._net.faults.copy_failed:
            for piece, copy in self._copies(job):
                if self._net.rng.random() < 0.5:
                    self._net.later(lambda piece=piece, copy=copy: self._land(job, piece, copy))  # type: ignore[misc]
            failure = Failure(code="transfer_failed", message="injected")
            self._report(CopyDone.of(job, failure, settled=False, write_s=0.0))
            return
        left = self._copies(job)
        self._net.rng.shuffle(left)
        self._next(job, left)

    def _copies(self, job: CopyJob) -> list[tuple[int, PageCopy]]:
        return [(i, copy) for i, (_, _, copies) in enumerate(job.pieces) for copy in copies]

    def _next(self, job: CopyJob, left: list[tuple[int, PageCopy]]) -> None:
        if not left:
            if self.notifies and job.num_bytes:
                self._notify(job)
            self._report(CopyDone.of(job, None, settled=True, write_s=0.0))
            return
        piece, copy = left.pop()
        self._land(job, piece, copy)
        self._net.later(lambda: self._next(job, left))

    def _notify(self, job: CopyJob) -> None:
        net, peer = self._net, self._net.engines[job.transport_address.partition("/")[0]]
        if net.rng.random() >= net.faults.note_lost:
            behind_s = net.faults.max_delay_s if net.faults.lands_late else 0.0
            net.later(lambda: peer._notified(job.key, job.index), min_delay_s=behind_s)

    def _land(self, job: CopyJob, piece: int, copy: PageCopy) -> None:
        if self._alive(job.transport_address) and self._process_lives(self._endpoint):
            source, destination, _ = job.pieces[piece]
            self._check(source, copy.source, copy.num_bytes, "reads")
            read = ctypes.string_at(source + copy.source, copy.num_bytes)
            if self._net.faults.lands_late and self.notifies:
                self._net.later(lambda: self._put(job, destination, copy.destination, read))
            else:
                self._put(job, destination, copy.destination, read)

    def _put(self, job: CopyJob, base: int, offset: int, read: bytes) -> None:
        if not self._alive(job.transport_address):
            return
        self._check(base, offset, len(read), "writes")
        ctypes.memmove(base + offset, read, len(read))

    def _check(self, base: int, offset: int, num_bytes: int, verb: str) -> None:
        """No copy may touch a page that is free: the next owner's bytes would be at risk."""
        pool = self._net.pools[base]
        for page in range(offset // pool.page_bytes, -(-(offset + num_bytes) // pool.page_bytes)):
            assert not pool.allocator.is_free(page), f"a copy {verb} free page {page} of {base:#x}"

    def _report(self, event: CopyDone | Notified | Reached | ReceiverOpened | PeerFenced) -> None:
        for _ in range(2 if self._net.rng.random() < self._net.faults.repeated else 1):
            self._net.later(lambda: self._net.post(self._endpoint, event))


@dataclasses.dataclass(frozen=True)
class SimDirectory:
    """`Directory` over a `SimNet`."""

    net: SimNet
    endpoint: str

    def find(self, address: Address) -> None:
        """See `Directory`."""
        self.net.later(lambda: self.net.post(self.endpoint, self._answer(address)))

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""
        if endpoint not in self.net.mailboxes:
            self.net.later(lambda: self.net.post(self.endpoint, PeerGone(instance)))

    def _answer(self, address: Address) -> PrefillFound | PrefillNotFound:
        entry = self.net.served.get(address)
        if entry is None:
            return PrefillNotFound(address, Failure(code="bootstrap_unreachable", message=f"nothing at {address}"))
        return PrefillFound(address, (entry,))
