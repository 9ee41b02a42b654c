"""What every transport must do, whatever moves its bytes. Mooncake runs for real, to real child processes."""

from __future__ import annotations

import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from tests.conformance.transport_kit import LocalPeer, Memory, PeerUnderTest, ProcessPeer

REGION_BYTES = 32 << 20
FAILURE_BOUND_S = 20.0
LATE = 255


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


@pytest.fixture(scope="module")
def mooncake() -> Iterator[tuple[Transport, Memory]]:
    """One engine for all tests here, as in a server; it reads its environment whenever it sets a timer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
        patch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
        transport = open_transport("mooncake", "127.0.0.1", None)
        memory = Memory(REGION_BYTES)
        transport.register([memory.region])
        yield transport, memory
        transport.close()


@pytest.fixture
def mooncake_rig(mooncake: tuple[Transport, Memory], tmp_path: pathlib.Path) -> Iterator[Rig]:
    count = iter(range(1000))
    transport, memory = mooncake
    memory.fill()
    rig = Rig(transport, memory, lambda: ProcessPeer(tmp_path / f"peer{next(count)}", REGION_BYTES))
    yield rig
    for peer in rig.peers:
        peer.stop()


@pytest.fixture
def memory_rig() -> Iterator[Rig]:
    hub = MemoryHub()
    transport, memory = MemoryTransport(hub), Memory(REGION_BYTES)
    transport.register([memory.region])
    rig = Rig(transport, memory, lambda: LocalPeer(hub, REGION_BYTES))
    yield rig
    rig.transport.close()


@pytest.fixture(params=["memory", "mooncake"])
def rig(request: pytest.FixtureRequest) -> Rig:
    found = request.getfixturevalue(f"{request.param}_rig")
    assert isinstance(found, Rig)
    return found


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


def test_mooncake_killed_in_the_middle_raises(mooncake_rig: Rig) -> None:
    peer = mooncake_rig.peer()
    assert isinstance(peer, ProcessPeer)
    copies = mooncake_rig.pages(peer, 30, 1 << 20)
    errors: list[TransferError] = []

    def write_until_it_fails() -> None:
        for _ in range(10_000):
            try:
                mooncake_rig.transport.write(peer.address, copies)
            except TransferError as error:
                errors.append(error)
                return

    writer = threading.Thread(target=write_until_it_fails)
    writer.start()
    deadline = time.monotonic() + 30
    while not peer.read().any() and time.monotonic() < deadline:
        time.sleep(0.001)
    peer.stop()
    writer.join(timeout=FAILURE_BOUND_S)
    assert not writer.is_alive()
    assert [error.code for error in errors] == ["engine_failed"]


def test_mooncake_reads_no_source_byte_after_a_stalled_write_failed(mooncake_rig: Rig) -> None:
    """A stopped peer: the write fails, and once it says that it is settled the source may be overwritten."""
    peer = mooncake_rig.peer()
    assert isinstance(peer, ProcessPeer)
    copies = mooncake_rig.pages(peer, 31, 1 << 20)
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        mooncake_rig.transport.write(peer.address, copies)
    assert caught.value.settled
    assert time.monotonic() - started < FAILURE_BOUND_S
    mooncake_rig.memory.bytes[:] = LATE
    peer.signal(signal.SIGCONT)
    await_steady(peer)
    assert not (peer.read() == LATE).any()


def await_steady(peer: ProcessPeer) -> None:
    """Return when the peer's region has stopped changing: equal in five looks, or after five seconds."""
    deadline, looks, last = time.monotonic() + 5, 0, -1
    while time.monotonic() < deadline and looks < 5:
        count = int(np.count_nonzero(peer.read()))
        looks = looks + 1 if count == last else 0
        last = count
        time.sleep(0.05)


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
