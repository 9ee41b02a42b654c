"""What every transport must do, whatever moves its bytes. All but `memory` run for real, to real child processes.

A new transport joins by its name in `ENGINES`; one of another package by the variable PDSERVE_TEST_TRANSPORTS.
"""

from __future__ import annotations

import functools
import random
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, NotifyingTransport, Transport
from pdserve.transfer.transports import nixl
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from tests.conformance.transport_kit import OTHERS, REGION_BYTES, LocalPeer, Memory, Open, PeerUnderTest, ProcessPeer
from tests.waiting import wait_until

FAILURE_BOUND_S = 20.0
LATE = 255
ENGINES = ("mooncake", "nixl", "shm", *OTHERS)
"""Transports by the names that `open_transport` knows; each is tested to peers in processes of their own."""
COMPOSED = ("auto",)
"""Made of those: tested where processes stop and die."""
NOTIFYING = ("nixl",)
"""Those that also say at the peer that a write is there."""


class Rig:
    """A transport under test, its memory, and a way to make peers."""

    def __init__(self, transport: Transport, memory: Memory, make_peer: Callable[[], PeerUnderTest]) -> None:
        self.transport = transport
        self.memory = memory
        self._make_peer = make_peer
        self.peers: list[PeerUnderTest] = []

    def peer(self) -> PeerUnderTest:
        """A new connected peer."""
        peer = self._make_peer()
        self.peers.append(peer)
        self.transport.connect(peer.address)
        return peer

    def pages(self, peer: PeerUnderTest, num_pages: int, page_bytes: int, seed: int = 1) -> list[Copy]:
        """`num_pages` scattered pages to other scattered places."""
        rng = random.Random(seed)
        slots = range(REGION_BYTES // page_bytes)
        sources, destinations = rng.sample(slots, num_pages), rng.sample(slots, num_pages)
        return [
            Copy(self.memory.region.address + source * page_bytes, peer.start + destination * page_bytes, page_bytes)
            for source, destination in zip(sources, destinations, strict=True)
        ]

    def expected(self, peer: PeerUnderTest, copies: list[Copy]) -> np.ndarray:
        """The peer's region after `copies` into zeros."""
        result = np.zeros(REGION_BYTES, dtype=np.uint8)
        for copy in copies:
            source, destination = copy.source - self.memory.region.address, copy.destination - peer.start
            result[destination : destination + copy.num_bytes] = self.memory.bytes[source : source + copy.num_bytes]
        return result


@pytest.fixture(params=[*ENGINES, *COMPOSED])
def process_rig(request: pytest.FixtureRequest, opened: Open) -> Iterator[Rig]:
    """Peers in processes of their own, which can be stopped and killed."""
    yield from _process_rig(request.param, opened)


@pytest.fixture(params=NOTIFYING)
def notifying_rig(request: pytest.FixtureRequest, opened: Open) -> Iterator[Rig]:
    """Peers that say when they are notified."""
    yield from _process_rig(request.param, opened)


@pytest.fixture(scope="module")
def own_memory() -> Memory:
    """Memory for the transport that needs no engine."""
    return Memory(REGION_BYTES)


@pytest.fixture(params=["memory", *ENGINES])
def rig(request: pytest.FixtureRequest, opened: Open, own_memory: Memory) -> Iterator[Rig]:
    """Any transport, any peers."""
    yield from _memory_rig(own_memory) if request.param == "memory" else _process_rig(request.param, opened)


def _process_rig(name: str, opened: Open) -> Iterator[Rig]:
    transport, memory, factory = opened(name)
    memory.fill()
    rig = Rig(transport, memory, lambda: factory.make(REGION_BYTES))
    yield rig
    for peer in rig.peers:
        transport.disconnect(peer.address)
        peer.stop()


def _memory_rig(memory: Memory) -> Iterator[Rig]:
    hub = MemoryHub()
    transport = MemoryTransport(hub)
    memory.fill()
    transport.register([memory.region])
    yield Rig(transport, memory, lambda: LocalPeer(hub, REGION_BYTES))
    transport.close()


def run_threads(jobs: list[Callable[[], None]]) -> list[TransferError]:
    """Run jobs at once; what they raised."""
    raised: list[TransferError] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except TransferError as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return raised


def test_scattered_small_pages_from_several_threads_arrive(rig: Rig) -> None:
    peer = rig.peer()
    copies = rig.pages(peer, 2000, 4096)
    shares = [copies[index::4] for index in range(4)]
    raised = run_threads([lambda share=share: rig.transport.write(peer.address, share) for share in shares])
    assert raised == []
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_more_entries_than_the_engine_can_queue_arrive(rig: Rig) -> None:
    peer = rig.peer()
    copies = rig.pages(peer, 5000, 512)
    rig.transport.write(peer.address, copies)
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_pages_of_odd_lengths_touch_no_byte_beside_them(rig: Rig) -> None:
    peer = rig.peer()
    base, copies, offset = rig.memory.region.address, [], 3
    for length in (1, 7, 64, 65, 4095, 65_537, 1_000_003):
        copies.append(Copy(base + offset, peer.start + 2 * offset, length))
        offset += length + 5
    rig.transport.write(peer.address, copies)
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_merged_big_pages_arrive(rig: Rig) -> None:
    peer = rig.peer()
    copies = rig.pages(peer, 3, 8 << 20)
    rig.transport.write(peer.address, copies)
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_empty_copies_and_no_copies_are_fine(rig: Rig) -> None:
    peer = rig.peer()
    base = rig.memory.region.address
    rig.transport.write(peer.address, [])
    rig.transport.write(peer.address, [Copy(base, peer.start, 0)])
    rig.transport.write(peer.address, [Copy(base, peer.start, 0), Copy(base + 8, peer.start + 8, 8)])
    assert np.array_equal(peer.read(), rig.expected(peer, [Copy(base + 8, peer.start + 8, 8)]))


@pytest.mark.parametrize("offset", [-64, REGION_BYTES - 8, REGION_BYTES + 4096])
def test_an_unregistered_source_is_refused_before_a_byte_moves(rig: Rig, offset: int) -> None:
    peer = rig.peer()
    base = rig.memory.region.address
    with pytest.raises(TransferError, match="not registered") as caught:
        rig.transport.write(peer.address, [Copy(base, peer.start, 64), Copy(base + offset, peer.start + 64, 64)])
    assert caught.value.settled
    assert not peer.read().any()


def test_an_unregistered_destination_fails_and_others_go_on(rig: Rig) -> None:
    peer = rig.peer()
    base = rig.memory.region.address
    with pytest.raises(TransferError):
        rig.transport.write(peer.address, [Copy(base, peer.start + REGION_BYTES + (1 << 30), 64)])
    copies = rig.pages(peer, 10, 4096)
    rig.transport.write(peer.address, copies)
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_regions_that_overlap_or_are_empty_are_refused(rig: Rig) -> None:
    base = rig.memory.region.address
    for region in (MemoryRegion(base + 100, 100), MemoryRegion(base - 50, 100), MemoryRegion(1 << 20, 0)):
        with pytest.raises(TransferError, match="cannot register"):
            rig.transport.register([region])


def test_connecting_to_nobody_fails_within_bounds(rig: Rig) -> None:
    peer = rig.peer()
    rig.transport.disconnect(peer.address)
    peer.stop()
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        rig.transport.connect(peer.address)
    assert caught.value.settled
    assert time.monotonic() - started < FAILURE_BOUND_S


def test_a_dead_peer_fails_within_bounds_and_others_are_unharmed(rig: Rig) -> None:
    dead, alive = rig.peer(), rig.peer()
    rig.transport.write(dead.address, rig.pages(dead, 4, 4096))
    dead.stop()
    copies = rig.pages(alive, 500, 4096)
    started = time.monotonic()
    raised = run_threads(
        [
            lambda: rig.transport.write(dead.address, rig.pages(dead, 50, 4096)),
            lambda: rig.transport.write(dead.address, rig.pages(dead, 700, 4096)),
            lambda: rig.transport.write(alive.address, copies),
        ]
    )
    assert len(raised) == 2
    assert time.monotonic() - started < FAILURE_BOUND_S
    assert np.array_equal(alive.read(), rig.expected(alive, copies))


def test_a_reborn_peer_is_reached_at_its_new_address(rig: Rig) -> None:
    first = rig.peer()
    rig.transport.write(first.address, rig.pages(first, 4, 4096))
    first.stop()
    with pytest.raises(TransferError):
        rig.transport.write(first.address, rig.pages(first, 4, 4096))
    rig.transport.disconnect(first.address)
    second = rig.peer()
    assert second.address != first.address
    copies = rig.pages(second, 200, 4096)
    rig.transport.write(second.address, copies)
    assert np.array_equal(second.read(), rig.expected(second, copies))


def test_a_peer_killed_in_the_middle_of_writes_is_seen(process_rig: Rig) -> None:
    peer, other = process_rig.peer(), process_rig.peer()
    copies = process_rig.pages(peer, 30, 1 << 20)
    errors: list[TransferError] = []

    def write_until_it_fails() -> None:
        deadline = time.monotonic() + 30
        while not errors and time.monotonic() < deadline:
            try:
                process_rig.transport.write(peer.address, copies)
            except TransferError as error:
                errors.append(error)

    writer = threading.Thread(target=write_until_it_fails)
    writer.start()
    wait_until(lambda: peer.read().any(), "the first bytes", 30, pause_s=0.001)
    peer.stop()
    writer.join(timeout=FAILURE_BOUND_S)
    assert not writer.is_alive()
    assert len(errors) == 1 and errors[0].settled
    copies = process_rig.pages(other, 30, 1 << 16)
    process_rig.transport.write(other.address, copies)
    assert np.array_equal(other.read(), process_rig.expected(other, copies))


def test_no_source_byte_is_read_once_a_write_to_a_stopped_peer_has_ended(process_rig: Rig) -> None:
    """The write fails, or succeeds where nobody's help is needed; once settled the source may be overwritten."""
    peer = process_rig.peer()
    assert isinstance(peer, ProcessPeer)
    copies = process_rig.pages(peer, 31, 1 << 20)
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    failed = run_threads([lambda: process_rig.transport.write(peer.address, copies)])
    assert all(error.settled for error in failed)
    assert time.monotonic() - started < FAILURE_BOUND_S
    expected = process_rig.expected(peer, copies)
    process_rig.memory.bytes[:] = LATE
    peer.signal(signal.SIGCONT)
    await_steady(peer)
    assert not (peer.read() == LATE).any()
    assert failed or np.array_equal(peer.read(), expected)


def test_a_stopped_peer_that_goes_on_is_written_to_again(process_rig: Rig) -> None:
    peer = process_rig.peer()
    assert isinstance(peer, ProcessPeer)
    peer.signal(signal.SIGSTOP)
    run_threads([lambda: process_rig.transport.write(peer.address, process_rig.pages(peer, 4, 4096))])
    peer.signal(signal.SIGCONT)
    copies = process_rig.pages(peer, 100, 4096, seed=2)
    write = functools.partial(process_rig.transport.write, peer.address, copies)
    wait_until(lambda: not run_threads([write]), "a write that arrives", FAILURE_BOUND_S)
    for copy in copies:
        first, last = copy.destination - peer.start, copy.destination - peer.start + copy.num_bytes
        assert np.array_equal(peer.read()[first:last], process_rig.expected(peer, copies)[first:last])


def test_connecting_to_a_stopped_peer_ends_within_bounds(process_rig: Rig) -> None:
    peer = process_rig.peer()
    assert isinstance(peer, ProcessPeer)
    process_rig.transport.disconnect(peer.address)
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    errors = run_threads([lambda: process_rig.transport.connect(peer.address)])
    assert all(error.settled for error in errors)
    assert time.monotonic() - started < FAILURE_BOUND_S
    peer.signal(signal.SIGCONT)


def test_bytes_are_there_when_write_returns_in_the_order_of_writes(rig: Rig) -> None:
    """The second of two writes to the same place wins, each time."""
    peer, base = rig.peer(), rig.memory.region.address
    for number in range(50):
        rig.transport.write(peer.address, [Copy(base + number * 64, peer.start, 64)])
        rig.transport.write(peer.address, [Copy(base + 4096 + number * 64, peer.start, 64)])
        assert np.array_equal(peer.read()[:64], rig.memory.bytes[4096 + number * 64 :][:64])


def test_the_transports_that_notify_are_those_that_say_so(rig: Rig) -> None:
    assert rig.transport.facts.notifies == (rig.transport.name in NOTIFYING)


def test_a_peer_is_notified_of_each_write_once_and_has_its_bytes_then(notifying_rig: Rig) -> None:
    """From several threads, of one copy and of more than go in one batch."""
    rig, peer = notifying_rig, notifying_rig.peer()
    assert isinstance(peer, ProcessPeer)
    share = REGION_BYTES // 4

    def job(which: int) -> None:
        size = share // (2 * nixl.BATCH_COPIES) if which == 0 else share // 50
        pages = range(which * share, which * share + share // size * size, size)
        jobs = [pages] if which == 0 else [pages[number : number + 1] for number in range(50)]
        for number, part in enumerate(jobs):
            first, length = part[0], len(part) * size
            note = b"%d %d %d %d" % (which * 50 + number, first, length, _checksum(rig, first, length))
            copies = [Copy(rig.memory.region.address + at, peer.start + at, size) for at in part]
            _notifying(rig).write_and_notify(peer.address, copies, note)

    assert run_threads([functools.partial(job, which) for which in range(4)]) == []
    _notifying(rig).write_and_notify(peer.address, [Copy(rig.memory.region.address, peer.start, 8)], b"1000 0 0 0")
    seen = await_notes(peer, 152)
    assert sorted(number for number, _ in seen) == [0, *range(50, 200), 1000]
    assert all(there for _, there in seen)
    rig.transport.write(peer.address, rig.pages(peer, 5, 4096))
    _notifying(rig).write_and_notify(peer.address, [Copy(rig.memory.region.address, peer.start, 8)], b"1001 0 0 0")
    assert await_notes(peer, 1) == [(1001, True)], "a write without a note, or the same note again"


def test_a_stopped_peer_is_notified_of_nothing_that_is_not_there(notifying_rig: Rig) -> None:
    rig, peer = notifying_rig, notifying_rig.peer()
    assert isinstance(peer, ProcessPeer)
    length = 16 << 20
    note = b"1 0 %d %d" % (length, _checksum(rig, 0, length))
    peer.signal(signal.SIGSTOP)
    failed = run_threads(
        [
            lambda: _notifying(rig).write_and_notify(
                peer.address, [Copy(rig.memory.region.address, peer.start, length)], note
            )
        ]
    )
    assert len(failed) == 1
    rig.memory.bytes[:] = LATE
    peer.signal(signal.SIGCONT)
    note = b"2 64 64 %d" % _checksum(rig, 64, 64)
    copies = [Copy(rig.memory.region.address + 64, peer.start + 64, 64)]
    write = functools.partial(_notifying(rig).write_and_notify, peer.address, copies, note)
    wait_until(lambda: not run_threads([write]), "a write that arrives", FAILURE_BOUND_S)
    assert await_notes(peer, 1) == [(2, True)]


def test_many_threads_write_thousands_of_small_pages_to_two_peers(rig: Rig) -> None:
    peers = [rig.peer(), rig.peer()]
    copies = [rig.pages(peer, 4000, 1024, seed) for seed, peer in enumerate(peers)]

    def job(which: int, share: int) -> None:
        for first in range(share * 500, share * 500 + 500, 100):
            rig.transport.write(peers[which].address, copies[which][first : first + 100])

    jobs = [functools.partial(job, which, share) for which in range(2) for share in range(8)]
    assert run_threads(jobs) == []
    for peer, sent in zip(peers, copies, strict=True):
        assert np.array_equal(peer.read(), rig.expected(peer, sent))


def test_writing_after_disconnecting_is_refused_until_connected_again(rig: Rig) -> None:
    peer = rig.peer()
    if rig.transport.name == "memory":
        pytest.skip("it keeps no connections")
    rig.transport.disconnect(peer.address)
    rig.transport.disconnect("nobody")
    with pytest.raises(TransferError, match="not connected") as caught:
        rig.transport.write(peer.address, rig.pages(peer, 1, 4096))
    assert caught.value.settled
    rig.transport.connect(peer.address)
    rig.transport.connect(peer.address)
    copies = rig.pages(peer, 10, 4096)
    rig.transport.write(peer.address, copies)
    assert np.array_equal(peer.read(), rig.expected(peer, copies))


def test_nonsense_addresses_are_refused(rig: Rig) -> None:
    for address in ("", "junk", "127.0.0.1:1", "shm:x:y", "auto:{}", "auto:{", 'auto:{"shm":"x"}'):
        with pytest.raises(TransferError) as caught:
            rig.transport.connect(address)
        assert caught.value.settled


def await_steady(peer: ProcessPeer) -> None:
    """Return when the peer's region has stopped changing: it is equal in five looks."""
    counts: deque[int] = deque(maxlen=6)

    def is_steady() -> bool:
        counts.append(int(np.count_nonzero(peer.read())))
        return len(counts) == counts.maxlen and len(set(counts)) == 1

    wait_until(is_steady, "the region does not change any more", FAILURE_BOUND_S, pause_s=0.05)


def await_notes(peer: ProcessPeer, count: int) -> list[tuple[int, bool]]:
    """The next so many, in the order in which they came."""
    return [peer.notes.get(timeout=FAILURE_BOUND_S) for _ in range(count)]


def _notifying(rig: Rig) -> NotifyingTransport:
    assert rig.transport.facts.notifies
    return cast(NotifyingTransport, rig.transport)


def _checksum(rig: Rig, first: int, length: int) -> int:
    return zlib.crc32(rig.memory.bytes[first : first + length])


def test_fake_checks_ranges_and_moves_nothing() -> None:
    memory, target = Memory(4096), Memory(4096, seed=2)
    before = target.bytes.copy()
    transport = open_transport("fake", "127.0.0.1")
    transport.register([memory.region])
    transport.connect("anywhere")
    transport.write("anywhere", [Copy(memory.region.address, target.region.address, 4096)])
    assert np.array_equal(target.bytes, before)
    assert not transport.facts.moves_bytes
    with pytest.raises(TransferError, match="not registered"):
        transport.write("anywhere", [Copy(memory.region.address, target.region.address, 4097)])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        open_transport("carrier-pigeon", "127.0.0.1")
