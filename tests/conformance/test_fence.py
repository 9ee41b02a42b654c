"""After `fence(peer)` no byte of that peer lands, whatever it does, and others go on. Senders are real processes.

A sender fills its share of our memory again and again, also after a failure. What it has written to is then given to
somebody else: filled with `OURS`, in which each byte of the sender's would be seen.
"""

from __future__ import annotations

import itertools
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Transport
from tests.conformance.transport_kit import OTHERS, REGION_BYTES, Memory, Open, PeerFactory, Sender
from tests.waiting import wait_until

FENCED = ("mooncake", "nixl", "auto", *OTHERS)
"""Those whose engines end what a peer writes. `auto` as to another host: by mooncake."""
BOUND_S = 60.0
OURS, FIRST, SECOND = 7, 101, 102
SHARE = 4 << 20
NUM_FENCES, NUM_AT_ONCE = 50, 4


class Rig:
    """A transport that receives, its memory, and senders to it."""

    def __init__(
        self, transport: Transport, memory: Memory, factory: PeerFactory, *, from_other_host: bool = False
    ) -> None:
        self.transport, self.memory = transport, memory
        self._factory = factory
        self.senders: list[Sender] = []
        self._peers: list[str] = []
        self._environment = {"OTHER_HOST": "1"} if from_other_host else {}
        memory.bytes[:] = 0

    def peer(self) -> str:
        """The name of a new peer; it is fenced in the end."""
        self._peers.append(uuid.uuid4().hex)
        return self._peers[-1]

    def open(self, peer: str) -> str:
        """The address of an engine that senders of this host may connect to."""
        address = self.transport.open_receiver(peer)
        self.transport.allow_sources(peer, ["127.0.0.1"])
        return address

    def send(self, address: str, share: slice, value: int, **environment: str) -> Sender:
        """A process that writes; returns once the last byte of its share has arrived."""
        sender = self.begin(self._factory, address, share, value, **environment)
        wait_until(lambda: bool(self.memory.bytes[share.stop - 1] == value), "the sender's bytes arrive")
        return sender

    def begin(self, factory: PeerFactory, address: str, share: slice, value: int, **environment: str) -> Sender:
        """A process that is about to write, made by `factory`."""
        start, num_bytes = self.memory.region.address + share.start, share.stop - share.start
        sender = factory.send(address, start, num_bytes, value, self._environment | environment)
        self.senders.append(sender)
        return sender

    def end(self) -> None:
        for sender in self.senders:
            sender.stop()
        for peer in self._peers:
            assert self.transport.fence(peer)


@pytest.fixture(params=FENCED)
def rig(request: pytest.FixtureRequest, opened: Open) -> Iterator[Rig]:
    rig = Rig(*opened(request.param), from_other_host=request.param == "auto")
    yield rig
    rig.end()


@pytest.fixture(params=("shm", "auto", "nixl"))
def local_rig(request: pytest.FixtureRequest, opened: Open, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Where a sender of the same host writes into our memory by itself; `auto` takes `shm` within a host."""
    transport, memory, factory = opened(request.param)
    if request.param != "nixl":
        rig = Rig(transport, memory, factory)
        yield rig
        rig.end()
        return
    monkeypatch.setenv("UCX_TLS", "all")
    transport = open_transport("nixl", "127.0.0.1", None)
    transport.register([memory.region])
    rig = Rig(transport, memory, factory)
    yield rig
    rig.end()
    transport.close()


def test_pages_of_a_sender_that_was_stopped_in_mid_write_are_reused_at_once(rig: Rig) -> None:
    ours, others = slice(0, SHARE), slice(SHARE, 2 * SHARE)
    peer, other = rig.peer(), rig.peer()
    address = rig.open(peer)
    assert rig.open(peer) == address, "it is open"
    sender = rig.send(address, ours, FIRST)
    rig.send(rig.open(other), others, SECOND)
    sender.signal(signal.SIGSTOP)
    assert rig.transport.fence(peer) and rig.transport.fence_drain_timeout_s == 0.0
    rig.memory.bytes[ours] = OURS
    renewed = rig.open(peer)
    assert renewed != address
    sender.signal(signal.SIGCONT)
    assert sender.failed.wait(BOUND_S)
    rig.memory.bytes[others] = 0
    wait_until(lambda: bool((rig.memory.bytes[others] == SECOND).all()), "the other peer writes on")
    assert (rig.memory.bytes[ours] == OURS).all(), "foreign bytes"
    rig.send(renewed, ours, FIRST)


def test_a_sender_that_runs_is_cut_off_in_mid_write(rig: Rig) -> None:
    share, peer = slice(0, SHARE), rig.peer()
    sender = rig.send(rig.open(peer), share, FIRST)
    assert rig.transport.fence(peer)
    rig.memory.bytes[share] = OURS
    assert sender.failed.wait(BOUND_S)
    assert (rig.memory.bytes[share] == OURS).all(), "foreign bytes"
    assert rig.transport.fence(peer), "again"


def test_who_has_never_been_told_an_address_is_fenced(rig: Rig) -> None:
    assert rig.transport.fence("nobody")


def test_a_sender_with_our_memory_in_reach_is_fenced_by_its_death_alone(local_rig: Rig) -> None:
    rig, share = local_rig, slice(0, SHARE)
    peer = rig.peer()
    address = rig.open(peer)
    sender = rig.send(address, share, FIRST, UCX_TLS="all")
    sender.signal(signal.SIGSTOP)
    assert not rig.transport.fence(peer)
    renewed = rig.open(peer)
    assert renewed != address
    assert not rig.transport.fence(peer), "what it has it keeps"
    sender.signal(signal.SIGCONT)
    assert sender.failed.wait(BOUND_S), "it can be told to stop, but who knows whether it does"
    assert not rig.transport.fence(peer)
    other = rig.peer()
    second = rig.send(rig.open(other), slice(SHARE, 2 * SHARE), SECOND, UCX_TLS="all")
    sender.stop()
    assert rig.transport.fence(peer) and not rig.transport.fence(other)
    rig.memory.bytes[share] = OURS
    second.stop()
    assert rig.transport.fence(other)
    assert (rig.memory.bytes[share] == OURS).all()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(7))
@pytest.mark.parametrize("rig", FENCED, indirect=True)
def test_no_foreign_byte_comes_in_a_thousand_fences(rig: Rig, part: int) -> None:
    """Four peers at a time, each fenced again and again in the middle of its first write; half of them stopped then.

    The sender of one round still tries to write during the next.
    """
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    rounds = itertools.count()
    failures: list[Exception] = []
    name = rig.transport.name

    def work(number: int) -> None:
        factory, size = PeerFactory(name), REGION_BYTES // NUM_AT_ONCE
        share, peer = slice(number * size, (number + 1) * size), rig.peer()
        ours, former = rig.memory.bytes[share], None
        try:
            while (turn := next(rounds)) < NUM_FENCES and not failures:
                ours[:] = OURS
                sender = rig.begin(factory, rig.open(peer), share, FIRST)
                wait_until(lambda: bool(ours[0] == FIRST), "the sender's bytes arrive")
                if turn % 2:
                    sender.signal(signal.SIGSTOP)
                assert rig.transport.fence(peer)
                torn = int((ours == OURS).any())
                ours[:] = OURS
                if turn % 2:
                    sender.signal(signal.SIGCONT)
                assert sender.failed.wait(BOUND_S)
                foreign = int(np.count_nonzero(ours != OURS))
                with lock:
                    counts.update({"fences": 1, "stopped": turn % 2, "in the middle": torn, "foreign bytes": foreign})
                if former is not None:
                    former.stop()
                former = sender
        except Exception as error:
            failures.append(error)
        finally:
            factory.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"\n{name}: {dict(counts)}")
    assert not failures and counts["fences"] == NUM_FENCES and counts["foreign bytes"] == 0
    assert counts["in the middle"] > NUM_FENCES // 10, "most were fenced between two writes"
