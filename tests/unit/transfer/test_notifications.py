"""Notes of writes, from the engine that gives them to the room that is believed to be whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import ParallelShape
from pdserve.transfer import notifications as notifications_module
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import CopyDone, CopyJob, Landed, PeerGone, TransferEvent
from pdserve.transfer.notifications import Notifications, encode_note
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.state import KVPoll
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub
from pdserve.transfer.wire import Done, Key, RankMemory, Region, TransferStats
from pdserve.transfer.workers import CopyWorkers
from tests.unit.transfer.kit import (
    ADDRESS,
    CLIENT_LEFT,
    Net,
    Pair,
    Side,
    assert_quiet_and_free,
    found,
    say,
)
from tests.unit.transfer.notifying import Notes, NotifyingMemory
from tests.unit.transfer.waiting import events_of, wait_until

KEY, OTHER = Key(1, 1, "decode-1"), Key(2, 1, "decode-1")


@pytest.fixture
def mailbox() -> Mailbox[TransferEvent]:
    return Mailbox()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def waiting(notes: Notes, mailbox: Mailbox[TransferEvent]) -> Iterator[Notifications]:
    waiting = Notifications(notes.take, mailbox.post)
    yield waiting
    waiting.close()
    assert not waiting._thread.is_alive()


def test_a_key_has_landed_when_all_its_notes_have_come_whenever_they_did(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent]
) -> None:
    for index in (0, 1):
        notes.came.put(encode_note(KEY, index))
    waiting.expect(OTHER, 1)
    waiting.expect(KEY, 3)
    notes.came.put(encode_note(KEY, 1))  # again: it stands for no other
    wait_until(notes.came.empty, "all were taken")
    assert mailbox.drain() == []
    notes.came.put(encode_note(KEY, 2))
    assert events_of(mailbox, 1) == [Landed(KEY, 0)]
    notes.came.put(encode_note(OTHER, 0))
    assert events_of(mailbox, 1) == [Landed(OTHER, 0)]
    assert not waiting._seen and not waiting._expected


def test_notes_that_do_not_come_are_counted_as_missing(
    notes: Notes, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications_module, "TIMEOUT_S", 0.05)
    waiting = Notifications(notes.take, mailbox.post)
    notes.came.put(encode_note(KEY, 0))
    waiting.expect(KEY, 3)
    assert events_of(mailbox, 1) == [Landed(KEY, 2)]
    waiting.close()


def test_time_in_which_the_process_was_stopped_does_not_count(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [0.0]
    monkeypatch.setattr(notifications_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))
    waiting.expect(KEY, 1)
    wait_until(lambda: waiting._expected, "it is expected")
    later[0] = 10 * notifications_module.TIMEOUT_S
    notes.came.put(encode_note(OTHER, 0))
    wait_until(lambda: waiting._seen, "it has looked since")
    assert mailbox.drain() == []
    notes.came.put(encode_note(KEY, 0))
    assert events_of(mailbox, 1) == [Landed(KEY, 0)]


def test_what_is_no_note_and_an_engine_that_fails_end_nothing(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent]
) -> None:
    bad = [b"", b"\xff", msgspec.msgpack.encode("note"), msgspec.msgpack.encode([1, 2]), RuntimeError("the engine")]
    for note in (*bad, encode_note(KEY, 0)):
        notes.came.put(note)
    waiting.expect(KEY, 1)
    assert events_of(mailbox, 1) == [Landed(KEY, 0)]


def test_notes_that_nobody_expects_are_forgotten_in_their_turn(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications_module, "MAX_KEYS", 3)
    for attempt in range(10):
        notes.came.put(encode_note(Key(5, attempt, "decode-1"), 0))
    for attempt in (9, 8):
        waiting.expect(Key(5, attempt, "decode-1"), 1)
        assert events_of(mailbox, 1) == [Landed(Key(5, attempt, "decode-1"), 0)]
    assert list(waiting._seen) == [Key(5, 7, "decode-1")]


def test_workers_bring_a_note_with_every_job_that_is_not_empty(mailbox: Mailbox[TransferEvent]) -> None:
    hub, peers = MemoryHub(), dict[str, NotifyingMemory]()
    sender, receiver = NotifyingMemory(hub, peers), NotifyingMemory(hub, peers)
    heard: Mailbox[TransferEvent] = Mailbox()
    memory = np.arange(64, dtype=np.uint8)
    for transport, half in ((sender, memory[:32]), (receiver, memory[32:])):
        transport.register([MemoryRegion(half.ctypes.data, half.nbytes)])
    sending, receiving = CopyWorkers(sender, mailbox.post, 2), CopyWorkers(receiver, heard.post, 2)
    try:
        assert sending.notifies and receiving.notifies
        for index in range(3):
            length = 0 if index == 1 else 8
            piece = (memory[:32].ctypes.data, memory[32:].ctypes.data, (PageCopy(8 * index, 8 * index, length),))
            sending.submit(CopyJob(KEY, index, "peer", receiver.address(), (piece,), num_bytes=length))
        assert all(isinstance(event, CopyDone) and event.failure is None for event in events_of(mailbox, 3))
        assert receiver.notes.came.qsize() == 2
        assert memory[32:].tolist() == [*range(8), *range(40, 48), *range(16, 24), *range(56, 64)]
        receiving.expect(KEY, 0, 2)
        assert events_of(heard, 1) == [Landed(KEY, 0)]
    finally:
        sending.close()
        receiving.close()


def meet(decode_ranks: int = 1, **changes: object) -> tuple[Net, Side, Side]:
    """A pair whose engines notify; decode's replica has so many ranks."""
    net = Net()
    others = [RankMemory(f"decode-1.{rank}", (Region(1 << 30, 1 << 20),)) for rank in range(1, decode_ranks)]
    shape = ParallelShape(tp_size=decode_ranks)
    prefill = Side(net, "prefill-1", notifies=True, num_heads=2)
    decode = Side(net, "decode-1", others=others, shape=shape, num_heads=2, **{"notifies": True} | changes)  # type: ignore[arg-type]
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    return net, prefill, decode


def test_done_is_believed_when_every_rank_has_been_notified() -> None:
    net, prefill, decode = meet(decode_ranks=2)
    pair = Pair(net, prefill, decode)
    pair.send()
    jobs = list(prefill.engine.jobs)
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is KVPoll.SUCCESS and pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    key = pair.receiver._room.key
    counts = [sum(job.transport_address == address for job in jobs) for address in ("decode-1", "decode-1.1")]
    assert decode.engine.expected == [(key, 0, counts[0]), (key, 1, counts[1])] and sum(counts) == len(jobs)
    decode.kv.handle(Landed(key, 0, rank=1))
    decode.kv.handle(Landed(key, 0, rank=1))
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT, "the slowest rank's state is the transfer's"
    assert pair.theirs[0].held_by("remote")
    decode.kv.handle(Landed(key, 0, rank=0))
    assert pair.receiver.poll() is KVPoll.SUCCESS and pair.receiver.stats.num_pages == 3
    pair.drop_requests()
    net.pump()
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_was_not_notified_fails_the_transfer_and_pages_wait_for_the_other(missing: int) -> None:
    net, prefill, decode = meet(decode_ranks=2)
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.pump()
    key = pair.receiver._room.key
    decode.kv.handle(Landed(key, 1, rank=missing))
    assert pair.theirs[0].held_by("remote")
    decode.kv.handle(Landed(key, 0, rank=1 - missing))
    assert pair.receiver.poll() is KVPoll.FAILED and pair.receiver.failure is not None
    assert pair.receiver.failure.code == "transfer_unconfirmed" and pair.receiver.failure.retryable
    assert decode.kv.counters["transfers_unconfirmed"] == 1
    pair.drop_requests()
    net.pump()
    assert_quiet_and_free(prefill, decode)


def test_a_receiver_that_left_keeps_its_pages_until_the_notes_have_come() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.drop = lambda packet: packet.sender == "decode-1"
    net.pump()
    pair.receiver.abort(CLIENT_LEFT)
    pair.drop_requests()
    assert decode.free == (13, 3)
    decode.kv.handle(Landed(pair.receiver._room.key, 0))
    assert decode.free == (16, 4)
    net.drop = lambda packet: False
    net.pass_time(3.0)
    assert_quiet_and_free(prefill, decode)


def test_a_sender_that_dies_before_the_notes_have_come_fails_the_room_and_frees_its_pages() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.pump()
    decode.kv.handle(PeerGone("prefill-1"))
    assert pair.receiver.poll() is KVPoll.FAILED
    pair.receiver.close()
    for lease in pair.theirs:
        lease.drop("request")
    assert decode.free == (13, 3)
    decode.kv.handle(Landed(pair.receiver._room.key, 0))
    assert decode.free == (16, 4)
    decode.kv.handle(Landed(pair.receiver._room.key, 0))  # nobody knows of it any more


@pytest.mark.parametrize("notified", [(), (1, 1), (1, 1, 1)])
def test_a_done_that_speaks_of_other_ranks_than_there_are_is_not_believed(notified: tuple[int, ...]) -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    done = Done(key=pair.receiver._room.key, stats=TransferStats(), notified=notified)
    say(net, prefill.instance, decode, done)
    assert pair.receiver.poll() is KVPoll.FAILED and pair.receiver.failure is not None
    assert pair.receiver.failure.code == "transfer_unconfirmed" and decode.engine.expected == []


def test_a_sender_whose_engine_notifies_is_not_believed_by_one_whose_engine_does_not() -> None:
    net, prefill, decode = meet(notifies=False)
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.FAILED and decode.engine.expected == []


def test_a_rank_that_nothing_was_written_to_is_not_waited_for() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.finish(pair.mine[1], AuxRecord(7, 0, 42), TransferStats())
    prefill.engine.jobs[0].num_bytes = 0
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS and decode.engine.expected == []
