"""A seeded network, transport and directory on a manual clock, with injected faults."""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from pdserve.base.clock import ManualClock
from pdserve.memory.lease import PageAllocator
from pdserve.protocol.failure import Failure
from pdserve.scheduler.scheduler import Event
from pdserve.sim.faults import CutLinks, Faults, Recorder, damaged
from pdserve.transfer.copy_workers import CANCELLED, NEVER_WRITTEN, PEER_GONE
from pdserve.transfer.events import (
    Address,
    CopyDone,
    CopyJob,
    FrameArrived,
    Notified,
    PeerConnected,
    PeerFenced,
    PeerGone,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
    ReceiverOpened,
)
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import MemoryKey

__all__ = ["Faults", "Pool", "SimCopyEngine", "SimDirectory", "SimNet", "SimSocket"]

Verb = Literal["reads", "writes"]
Grants = Callable[[Verb, int, MemoryKey], bool]
"""Whether a copy of a key may touch a page now: the key holds the source page, or has published the target page."""
MAX_LANDINGS = 8
"""Number of moments at which bytes of one job land, so that many small copies take no longer than a few."""
UNREACHABLE = Failure(code="bootstrap_unreachable", message="no bootstrap server answers")
INJECTED = Failure(code="transfer_failed", message="injected")
STALLED = Failure(code="transfer_failed", message="the link is cut")


@dataclasses.dataclass(frozen=True)
class Pool:
    """Registered memory at an address, with its page allocator and the `Grants` check; None checks nothing."""

    page_bytes: int
    allocator: PageAllocator
    grants: Grants | None = None
    is_aux: bool = False


class Inbox(Protocol):
    """Destination of events of a process or endpoint."""

    def post(self, event: Event) -> None:
        """Deliver `event`. May be called on any thread."""
        ...


class SimNet:
    """Schedules actions after random delays. `mailboxes` has the live control endpoints and processes, by name.

    A name without a mailbox receives no events and copies nothing. `counts` is the number of faults by kind. `stopped`
    processes begin no copies; their copies in flight may continue. While `calm` is set, no new fault happens.
    """

    def __init__(self, seed: int, clock: ManualClock, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.clock = clock
        self.faults = faults
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.mailboxes: dict[str, Inbox] = {}
        self.served: dict[Address, tuple[tuple[str, str], ...]] = {}
        """Instance and control endpoint of each replica behind a bootstrap address."""
        self.pools: dict[int, Pool] = {}
        self.engines: dict[str, SimCopyEngine] = {}
        self.processes: dict[str, list[str]] = {}
        """Process names of all ranks, by instance."""
        self.hosts: dict[str, str] = {}
        """Host by endpoint or process; a name that is missing is its own host."""
        self.stopped: set[str] = set()
        self.links = CutLinks()
        self.recorder: Recorder | None = None
        self.objects: dict[str, bytes] = {}
        """Objects of the store that all servers share."""
        self.counts: Counter[str] = Counter()
        self.calm = False

    def later(self, action: Callable[[], None], max_delay_s: float | None = None, *, min_delay_s: float = 0.0) -> None:
        """Run `action` after a random delay, in seconds. `max_delay_s` None means the configured maximum."""
        delay_s = min_delay_s + self.rng.uniform(0, self.faults.max_delay_s if max_delay_s is None else max_delay_s)
        heapq.heappush(self._queue, (self.clock.now() + delay_s, next(self._count), action))

    def happens(self, kind: str, probability: float) -> bool:
        """Draw whether a fault happens, and count it."""
        if self.calm or probability <= 0 or self.rng.random() >= probability:
            return False
        self.counts[kind] += 1
        return True

    def is_cut(self, source: str, target: str) -> bool:
        """Whether traffic from `source` to `target`, endpoints or processes, is lost now."""
        return self.links.is_cut(self.hosts.get(source, source), self.hosts.get(target, target), self.clock.now())

    def deliver(self) -> None:
        """Run all actions that are due."""
        while self._queue and self._queue[0][0] <= self.clock.now():
            heapq.heappop(self._queue)[2]()

    @property
    def busy(self) -> bool:
        """Whether any action is scheduled."""
        return bool(self._queue)

    def post(self, endpoint: str, event: Event) -> None:
        """Post to the mailbox of `endpoint`, if its process is alive."""
        mailbox = self.mailboxes.get(endpoint)
        if mailbox is not None:
            mailbox.post(event)


@dataclasses.dataclass(frozen=True)
class SimSocket:
    """`ControlSocket` over a `SimNet`: frames are delayed, reordered, repeated and lost."""

    net: SimNet
    endpoint: str

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""
        net, faults = self.net, self.net.faults
        if net.recorder is not None:
            net.recorder.record(endpoint, frame)
        if net.is_cut(self.endpoint, endpoint):
            net.counts["frames cut off"] += 1
            return
        if net.happens("frames lost", faults.lost):
            return
        for _ in range(2 if net.happens("frames repeated", faults.repeated) else 1):
            arrives = damaged(frame, net.rng) if net.happens("frames damaged", faults.frame_damaged) else frame
            net.later(lambda arrives=arrives: net.post(endpoint, FrameArrived(arrives)))  # type: ignore[misc]

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""


class SimCopyEngine:
    """`CopyEngine` of the process `endpoint`. Bytes move copy by copy at random moments, read at that moment.

    A job starts some time after its layers are written. Over a cut link it is retried after random delays.
    Notifications arrive some time after
    their bytes. With `fences` a fence ends a sender's writes. Without it only the death of the sender's process does,
    as with transfer backend shm.
    """

    fence_drain_timeout_s = 0.0

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
        self._waiting: set[tuple[MemoryKey, int]] = set()
        """Jobs whose layers are not written, by key and index."""
        self._receivers: set[str] = set()
        """Addresses that peers can write to."""
        self._notes: dict[MemoryKey, set[int]] = defaultdict(set)
        self._expected: dict[MemoryKey, int] = {}
        net.engines[endpoint] = self

    @property
    def drain_timeout_s(self) -> float:
        """See `CopyEngine`. Longer than any delay."""
        return self._net.faults.max_delay_s * 2

    def connect(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`. The result is reported later."""
        self._report(PeerConnected(transport_address, None if self._alive(transport_address) else PEER_GONE))
        return False

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        self._waiting.add((job.key, job.index))
        job.layer_events.when_written(
            job.num_layers, lambda written: self._release(job, None if written else NEVER_WRITTEN)
        )

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        self._release(job, CANCELLED)

    def _release(self, job: CopyJob, failure: Failure | None) -> None:
        """Start or fail a job that waits for its layers, later; does nothing for other jobs."""
        if (job.key, job.index) in self._waiting:
            self._waiting.remove((job.key, job.index))
            self._net.later(lambda: self._start(job, failure))

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        address = f"{self._endpoint}/{peer}"
        self._receivers.add(address)
        self._report(ReceiverOpened(peer, address, None))

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """See `CopyEngine`. The simulated engines accept connections from all hosts."""

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._net.later(lambda: self._end_receiver(peer))

    def _end_receiver(self, peer: str) -> None:
        sender = peer.partition("#")[0]
        fenced = self._fences or not any(map(self._process_lives, self._net.processes.get(sender, ())))
        if fenced:
            self._receivers.discard(f"{self._endpoint}/{peer}")
        self._report(PeerFenced(peer, fenced))

    def _alive(self, address: str) -> bool:
        """Whether bytes can land at the receiving engine of `address`."""
        process = self._process(address)
        engine = self._net.engines.get(process)
        return self._process_lives(process) and engine is not None and address in engine._receivers

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        assert key not in self._expected, "expected twice"
        if len(self._notes[key]) >= count:
            return True
        self._expected[key] = count
        self._net.later(lambda: self._give_up(key), min_delay_s=self.drain_timeout_s)
        return False

    def _notified(self, key: MemoryKey, index: int) -> None:
        self._notes[key].add(index)
        self._look(key)

    def _look(self, key: MemoryKey) -> None:
        if len(self._notes[key]) == self._expected.get(key):
            del self._expected[key]
            self._report(Notified(key, 0))

    def _give_up(self, key: MemoryKey) -> None:
        count = self._expected.pop(key, 0)
        if count:
            self._report(Notified(key, count - len(self._notes[key])))

    def _start(self, job: CopyJob, failure: Failure | None) -> None:
        if not self._process_lives(self._endpoint):
            return  # the process is dead, and its copy threads with it
        if job.cancelled or not self._alive(job.transport_address):
            failure = CANCELLED if job.cancelled else PEER_GONE
        if failure is not None:
            self._report(CopyDone.of(job, failure, settled=True, write_s=0.0))
            return
        if self._endpoint in self._net.stopped:
            self._soon(lambda: self._start(job, failure))
            return
        if self._net.happens("copies failed", self._net.faults.copy_failed):
            for piece, copy in self._copies(job):
                if self._net.rng.random() < 0.5:
                    self._net.later(lambda piece=piece, copy=copy: self.land(job, piece, copy))  # type: ignore[misc]
            self._report(CopyDone.of(job, INJECTED, settled=False, write_s=0.0))
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
        if self._endpoint in self._net.stopped and self._net.rng.random() < 0.5:
            self._soon(lambda: self._next(job, left))
            return
        if self._net.is_cut(self._endpoint, self._process(job.transport_address)):
            self._wait_for_link(job, left)
            return
        at_once = -(-sum(len(copies) for _, _, copies in job.pieces) // MAX_LANDINGS)
        for piece, copy in left[-at_once:]:
            self.land(job, piece, copy)
        del left[-at_once:]
        self._net.later(lambda: self._next(job, left))

    def _wait_for_link(self, job: CopyJob, left: list[tuple[int, PageCopy]]) -> None:
        """Hold the bytes in transit while the link is cut, or until the engine fails the copy."""
        if self._net.happens("copies given up over a cut link", 0.03):
            for piece, copy in left:
                if self._net.rng.random() < 0.5:
                    self._net.later(lambda piece=piece, copy=copy: self.land(job, piece, copy))  # type: ignore[misc]
            self._report(CopyDone.of(job, STALLED, settled=False, write_s=0.0))
            return
        self._soon(lambda: self._next(job, left))

    def _soon(self, action: Callable[[], None]) -> None:
        """Retry later, never at the same time: `deliver` would not return."""
        self._net.later(action, max(self._net.faults.max_delay_s, 0.001), min_delay_s=0.001)

    def _process(self, transport_address: str) -> str:
        """Return the receiving process of `transport_address`."""
        return transport_address.partition("/")[0]

    def _notify(self, job: CopyJob) -> None:
        net, peer = self._net, self._net.engines[self._process(job.transport_address)]
        if not net.happens("notes lost", net.faults.note_lost):
            behind_s = net.faults.max_delay_s if net.faults.lands_late else 0.0
            net.later(lambda: peer._notified(job.key, job.index), min_delay_s=behind_s)

    def land(self, job: CopyJob, piece: int, copy: PageCopy) -> None:
        """Copy bytes of `piece` of `job` to the receiver, if both processes live."""
        if self._alive(job.transport_address) and self._process_lives(self._endpoint):
            source, destination, _ = job.pieces[piece]
            self._check(job, source, copy.source, copy.num_bytes, "reads")
            read = ctypes.string_at(source + copy.source, copy.num_bytes)
            if self._net.faults.lands_late and self.notifies:
                self._net.counts["copies seen late"] += 1
                self._net.later(lambda: self._put(job, destination, copy.destination, read))
            else:
                self._put(job, destination, copy.destination, read)

    def _put(self, job: CopyJob, base: int, offset: int, read: bytes) -> None:
        if not self._alive(job.transport_address):
            return
        self._check(job, base, offset, len(read), "writes")
        if not self._net.pools[base].is_aux and self._net.happens("pages damaged", self._net.faults.kv_damaged):
            read = damaged(read, self._net.rng)
        ctypes.memmove(base + offset, read, len(read))

    def _check(self, job: CopyJob, base: int, offset: int, num_bytes: int, verb: Verb) -> None:
        """Assert that the copy touches no page that is free, or that another key has been given since."""
        pool = self._net.pools[base]
        for page in range(offset // pool.page_bytes, -(-(offset + num_bytes) // pool.page_bytes)):
            assert not pool.allocator.is_free(page), f"a copy {verb} free page {page} of {base:#x}"
            if pool.grants is not None:
                assert pool.grants(verb, page, job.key), f"a copy of {job.key} {verb} page {page}, which is not its own"

    def _report(self, event: CopyDone | Notified | PeerConnected | ReceiverOpened | PeerFenced) -> None:
        for _ in range(2 if self._net.rng.random() < self._net.faults.repeated else 1):
            self._net.later(lambda: self._net.post(self._endpoint, event))


@dataclasses.dataclass(frozen=True)
class SimDirectory:
    """`Directory` over a `SimNet`."""

    net: SimNet
    endpoint: str

    def find(self, address: Address) -> None:
        """See `Directory`."""
        net, faults = self.net, self.net.faults
        stale = self._answer(address) if net.happens("stale look-ups", faults.stale_directory) else None
        if not net.happens("slow look-ups", faults.slow_directory):
            net.later(lambda: net.post(self.endpoint, stale or self._answer(address)))
        elif net.happens("look-ups without an answer", 0.3):
            nothing = PrefillNotFound(address, UNREACHABLE)
            net.later(lambda: net.post(self.endpoint, nothing), faults.max_look_up_s)
        else:
            net.later(lambda: net.post(self.endpoint, stale or self._answer(address)), faults.max_look_up_s)

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""
        net = self.net
        if net.is_cut(self.endpoint, endpoint) or net.is_cut(endpoint, self.endpoint):
            net.counts["probes cut off"] += 1
            return
        listens = endpoint in net.mailboxes
        lie = "probes refused though alive" if listens else "probes answered though dead"
        if net.happens(lie, net.faults.probe_lies):
            listens = not listens
        net.later(lambda: net.post(self.endpoint, PeerListens(instance) if listens else PeerGone(instance)))

    def _answer(self, address: Address) -> PrefillFound | PrefillNotFound:
        replicas = self.net.served.get(address)
        if replicas is None or self.net.is_cut(self.endpoint, address[0]) or self.net.is_cut(address[0], self.endpoint):
            return PrefillNotFound(address, UNREACHABLE)
        return PrefillFound(address, replicas)
