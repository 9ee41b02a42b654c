"""The shm transport where the conformance suite does not look: whom it trusts, what it refuses, when it lets go."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports import shm
from pdserve.transfer.transports import shm as shm_share
from pdserve.transfer.transports.shm import SMALL_BYTES, MemcpyEngine, Move, ShmTransport
from tests.waiting import wait_until

NUM_BYTES = 1 << 20


class End:
    """A transport and its memory."""

    def __init__(self, fill: int) -> None:
        self.bytes = np.frombuffer(shared.allocate(NUM_BYTES), dtype=np.uint8)
        self.bytes[:] = fill
        self.start = int(self.bytes.ctypes.data)
        self.transport = ShmTransport()
        self.transport.register([MemoryRegion(self.start, NUM_BYTES)])
        self.address = self.transport.address()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A sender and a receiver in this process."""
    pair = End(1), End(0)
    yield pair
    for end in pair:
        end.transport.close()


def test_several_regions_of_one_and_of_several_segments_are_each_found(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    other = np.frombuffer(shared.allocate(NUM_BYTES), dtype=np.uint8)
    start = int(other.ctypes.data)
    receiver.transport.register([MemoryRegion(start + 4096, 8192), MemoryRegion(start + 65_536, 100)])
    sender.transport.connect(receiver.address)
    copies = [
        Copy(sender.start, start + 4096 + 8191, 1),
        Copy(sender.start, receiver.start, SMALL_BYTES + 1),
        Copy(sender.start, start + 65_536, 100),
    ]
    sender.transport.write(receiver.address, copies)
    assert np.flatnonzero(other).tolist() == [12_287, *range(65_536, 65_636)]
    assert receiver.bytes.sum() == SMALL_BYTES + 1
    for address, num_bytes in ((start, 1), (start + 4096, 8193), (start + 65_536, 101)):
        with pytest.raises(TransferError, match="not registered at the peer"):
            sender.transport.write(receiver.address, [Copy(sender.start, address, num_bytes)])


def test_memory_that_nobody_can_map_is_refused(ends: tuple[End, End]) -> None:
    private = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(TransferError, match="not in memory that others can map"):
        ends[0].transport.register([MemoryRegion(int(private.ctypes.data), 4096)])


def test_a_peer_on_another_host_is_refused_by_name(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_share, "host_identity", lambda: "elsewhere")
    with pytest.raises(TransferError, match="on another host") as caught:
        ends[0].transport.connect(ends[1].address)
    assert caught.value.code == "other_host" and not caught.value.retryable and caught.value.settled


def test_a_process_of_another_user_is_shown_nothing(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    name = ends[1].address.rpartition(":")[2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as intruder:
        intruder.settimeout(10)
        intruder.connect(f"\0pdserve-shm-{name}")
        content, files, _, _ = socket.recv_fds(intruder, 1000, 10)
    assert (content, files) == (b"", [])
    with pytest.raises(TransferError, match="of user"):
        ends[0].transport.connect(ends[1].address)


@pytest.mark.parametrize("offer", [b"junk", msgspec.msgpack.encode(shm_share.Offer("x", ()))])
def test_what_is_no_offer_is_refused(ends: tuple[End, End], offer: bytes) -> None:
    name = "0" * 31 + "1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0pdserve-shm-{name}")
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            connection.send(offer)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError, match="cannot map"):
            ends[0].transport.connect(f"shm:{shm_share.host_identity()}:{name}")
        thread.join()


def test_a_peer_that_closes_is_gone_and_its_memory_is_let_go_of(ends: tuple[End, End]) -> None:
    sender = ends[0]
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        third = End(0)
        sender.transport.connect(third.address)
        sender.transport.write(third.address, [Copy(sender.start, third.start, 10)])
        third.transport.close()
        with pytest.raises(TransferError, match="has ended"):
            sender.transport.write(third.address, [Copy(sender.start, third.start, 10)])
        sender.transport.disconnect(third.address)
        with pytest.raises(TransferError, match="no process"):
            sender.transport.connect(third.address)
        del third
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_receiver_lets_go_of_senders_that_left(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sender.transport.connect(receiver.address)
        sender.transport.disconnect(receiver.address)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "all but the last connection are closed")


def test_a_closed_transport_connects_to_nobody(ends: tuple[End, End]) -> None:
    sender = End(1)
    sender.transport.close()
    with pytest.raises(TransferError, match="closed"):
        sender.transport.connect(ends[1].address)


@pytest.mark.parametrize("num_bytes", [1, 300, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("count", [1, 3, 4, 50])
def test_a_write_of_several_batches_arrives_whole(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, num_bytes: int, count: int
) -> None:
    monkeypatch.setattr(shm, "BATCH_BYTES", 1000)
    sender, receiver = ends
    sender.transport.connect(receiver.address)
    step = num_bytes + 3
    copies = [Copy(sender.start + i * step, receiver.start + i * step, num_bytes) for i in range(count)]
    sender.transport.write(receiver.address, copies)
    wanted = np.zeros(NUM_BYTES, dtype=np.uint8)
    for i in range(count):
        wanted[i * step : i * step + num_bytes] = 1
    assert (receiver.bytes == wanted).all()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("sizes", [[0, 1, 4096], [SMALL_BYTES], [SMALL_BYTES + 1, 3], [1 << 20] * 5])
def test_moves_land_where_they_should_and_nowhere_else(native: bool, sizes: list[int]) -> None:
    move, gap = MemcpyEngine(native=native), 7
    source = np.random.default_rng(0).integers(1, 256, sum(sizes) + gap * len(sizes), dtype=np.uint8)
    target = np.zeros(len(source), dtype=np.uint8)
    moves: list[Move] = []
    wanted = target.copy()
    at = 0
    for size in sizes:
        moves.append((target.ctypes.data + at, source.ctypes.data + at + gap, size))
        wanted[at : at + size] = source[at + gap : at + gap + size]
        at += size + gap
    move(moves[::-1])
    assert (target == wanted).all()
