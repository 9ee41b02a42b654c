"""Notes of writes, from the engine that gives them to the room that is believed to be whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import ParallelShape
from pdserve.errors import TransferError
from pdserve.transfer import notifications as notifications_module
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import CopyDone, CopyJob, Notified, PeerGone, TransferEvent
from pdserve.transfer.notifications import Notifications, encode_note
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.room import KVPoll
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports.failing import FailingTransport
from pdserve.transfer.transports.memory import MemoryHub
from pdserve.transfer.wire import MemoryKey, Packet, RankMemory, TransferDone, TransferEnded, TransferStats, WireRegion
from tests.unit.transfer.kit import (
    ADDRESS,
    BROKEN,
    CLIENT_LEFT,
    DRAIN_TIMEOUT_S,
    Net,
    Pair,
    Side,
    assert_quiet_and_free,
    found,
    say,
)
from tests.unit.transfer.notifying import Notes, NotifyingMemory
from tests.waiting import events_of, wait_until

KEY, OTHER, LAST = (MemoryKey(room, 1, "decode-1") for room in (1, 2, 3))


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def waiting(notes: Notes, mailbox: Mailbox[TransferEvent]) -> Iterator[Notifications]:
    before = set(threading.enumerate())
    waiting = Notifications(notes.take, mailbox.post)
    yield waiting
    waiting.close()
    assert not any(thread.name == "kv-notes" for thread in set(threading.enumerate()) - before)


def expect_last(notes: Notes, waiting: Notifications) -> Notified:
    """Expect a note of another key, which comes behind all that have come; return its report."""
    assert not waiting.expect(LAST, 1)
    notes.came.put(encode_note(LAST, 0))
    return Notified(LAST, 0)


def test_notes_that_have_come_are_found_at_once(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent]
) -> None:
    for index in (0, 1, 1, 2):
        notes.came.put(encode_note(KEY, index))
    assert waiting.expect(KEY, 3)
    last = expect_last(notes, waiting)
    assert events_of(mailbox, 1) == [last], "what was found at once is not reported"
    assert not waiting.expect(KEY, 1), "and is forgotten"


def test_notes_that_come_later_are_reported_whatever_else_comes(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent]
) -> None:
    for index in (0, 1):
        notes.came.put(encode_note(KEY, index))
    assert not waiting.expect(OTHER, 1)
    assert not waiting.expect(KEY, 3)
    notes.came.put(encode_note(KEY, 1))  # again: it stands for no other
    last = expect_last(notes, waiting)
    assert events_of(mailbox, 1) == [last]
    notes.came.put(encode_note(KEY, 2))
    assert events_of(mailbox, 1) == [Notified(KEY, 0)]
    notes.came.put(encode_note(OTHER, 0))
    assert events_of(mailbox, 1) == [Notified(OTHER, 0)]
    last = expect_last(notes, waiting)
    assert events_of(mailbox, 1) == [last], "each is reported once"
    assert not waiting.expect(KEY, 1) and not waiting.expect(OTHER, 1), "what was reported is forgotten"


def test_notes_that_do_not_come_are_counted_as_missing(
    notes: Notes, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications_module, "TIMEOUT_S", 0.05)
    waiting = Notifications(notes.take, mailbox.post)
    notes.came.put(encode_note(KEY, 0))
    assert not waiting.expect(KEY, 3)
    assert events_of(mailbox, 1) == [Notified(KEY, 2)]
    waiting.close()


def test_time_in_which_the_process_was_stopped_does_not_count(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [0.0]
    monkeypatch.setattr(notifications_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))
    assert not waiting.expect(KEY, 1)
    later[0] = 10 * notifications_module.TIMEOUT_S
    last = expect_last(notes, waiting)
    assert events_of(mailbox, 1) == [last]
    notes.came.put(encode_note(KEY, 0))
    assert events_of(mailbox, 1) == [Notified(KEY, 0)]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xff",
        b"\x92\x93\x01\x01\xa2\xff\xff\x00",
        msgspec.msgpack.encode([{"room": 1, "attempt": 1, "origin": 7}, 0]),
        b"\x92\x83\xa4room\x01\xa7attempt\x01\xa6origin\xa2\xff\xff\x00",
        b"\x91" * 100_000,
    ],
    ids=["empty", "no msgpack", "key is a list", "wrong type", "not utf-8", "nested"],
)
def test_what_is_no_note_is_passed_over(
    bad: bytes, notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent], caplog: pytest.LogCaptureFixture
) -> None:
    notes.came.put(bad)
    notes.came.put(encode_note(KEY, 0))
    assert waiting.expect(KEY, 1)
    assert "cannot decode a transfer notification" in caplog.text
    notes.came.put(bad)
    assert not waiting.expect(OTHER, 1)
    notes.came.put(bad)
    notes.came.put(encode_note(OTHER, 0))
    assert events_of(mailbox, 1) == [Notified(OTHER, 0)]


def test_an_engine_that_cannot_be_asked_is_asked_again_and_does_not_flood_the_log(
    notes: Notes, waiting: Notifications, mailbox: Mailbox[TransferEvent], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(16):
        notes.came.put(RuntimeError("the engine"))
    notes.came.put(encode_note(KEY, 0))
    assert not waiting.expect(KEY, 1)
    assert events_of(mailbox, 1) == [Notified(KEY, 0)]
    assert caplog.text.count("cannot be read") == 5  # the 1st, 2nd, 4th, 8th and 16th


def test_notes_that_nobody_expects_are_taken_and_forgotten_in_their_turn(
    notes: Notes, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications_module, "MAX_KEYS", 3)
    monkeypatch.setattr(notifications_module, "IDLE_LOOK_S", 0.01)
    waiting = Notifications(notes.take, mailbox.post)
    keys = [MemoryKey(5, attempt, "decode-1") for attempt in range(10)]
    for key in keys:
        notes.came.put(encode_note(key, 0))
    wait_until(notes.came.empty, "all were taken")
    assert [waiting.expect(key, 1) for key in keys] == [False] * 7 + [True] * 3
    waiting.close()


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
        assert receiving.expect(KEY, 0, 2)
        assert not receiving.expect(OTHER, 0, 1)
        sending.submit(CopyJob(OTHER, 0, "peer", receiver.address(), (piece,), num_bytes=8))
        assert events_of(heard, 1) == [Notified(OTHER, 0)]
    finally:
        sending.close()
        receiving.close()


def meet(decode_ranks: int = 1, **changes: object) -> tuple[Net, Side, Side]:
    """A pair whose engines notify; decode's replica has so many ranks."""
    net = Net()
    others = [RankMemory(f"decode-1.{rank}", (WireRegion(1 << 30, 1 << 20),)) for rank in range(1, decode_ranks)]
    shape = ParallelShape(tp_size=decode_ranks)
    prefill = Side(net, "prefill-1", notifies=True, num_heads=2)
    decode = Side(net, "decode-1", others=others, shape=shape, num_heads=2, **{"notifies": True} | changes)  # type: ignore[arg-type]
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    return net, prefill, decode


def sent(decode_ranks: int = 1) -> tuple[Net, Side, Side, Pair]:
    """A pair that has sent a request: prefill is done, and decode has heard so."""
    net, prefill, decode = meet(decode_ranks)
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.pump()
    return net, prefill, decode, pair


def test_done_is_believed_when_every_rank_has_been_notified() -> None:
    net, prefill, decode = meet(decode_ranks=2)
    pair = Pair(net, prefill, decode)
    pair.send()
    jobs = list(prefill.engine.jobs)
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is KVPoll.SUCCESS and pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    key = pair.receiver.key
    counts = [sum(job.transport_address == address for job in jobs) for address in ("decode-1", "decode-1.1")]
    assert decode.engine.expected == [(key, 0, counts[0]), (key, 1, counts[1])] and sum(counts) == len(jobs)
    decode.kv.handle(Notified(key, 0, rank=1))
    decode.kv.handle(Notified(key, 0, rank=1))
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT, "the slowest rank's state is the transfer's"
    assert pair.theirs[0].held_by("remote")
    decode.kv.handle(Notified(key, 0, rank=0))
    assert pair.receiver.poll() is KVPoll.SUCCESS and pair.receiver.stats.num_pages == 3
    pair.drop_requests()
    net.pump()
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_was_not_notified_fails_the_transfer_and_pages_wait_for_the_other(missing: int) -> None:
    net, prefill, decode, pair = sent(decode_ranks=2)
    key = pair.receiver.key
    decode.kv.handle(Notified(key, 1, rank=missing))
    assert pair.theirs[0].held_by("remote")
    decode.kv.handle(Notified(key, 0, rank=1 - missing))
    assert pair.receiver.poll() is KVPoll.FAILED and pair.receiver.failure is not None
    assert pair.receiver.failure.code == "transfer_unconfirmed" and pair.receiver.failure.retryable
    assert decode.kv.counters["transfers_unconfirmed"] == 1
    pair.drop_requests()
    net.pass_time(DRAIN_TIMEOUT_S - 0.5)
    assert decode.free == (13, 3), "what nobody has told of may still come"
    net.pass_time(1.0)
    assert_quiet_and_free(prefill, decode)


def test_notes_that_have_come_before_done_make_no_detour() -> None:
    net, prefill, decode = meet()
    decode.engine.notified = True
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS and len(decode.engine.expected) == 1
    pair.drop_requests()
    net.pump()
    assert_quiet_and_free(prefill, decode)


def test_a_receiver_that_left_keeps_its_pages_until_the_notes_have_come() -> None:
    """Prefill was done before it heard of the abort, and answers that it writes no more."""
    net, prefill, decode, pair = sent()
    pair.receiver.abort(CLIENT_LEFT)
    pair.drop_requests()
    net.pump()
    assert net.said(TransferEnded) and net.said(TransferDone)
    assert decode.free == (13, 3)
    decode.kv.handle(Notified(pair.receiver.key, 0))
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("order", ["ended first", "done first"])
def test_a_done_that_crosses_an_abort_is_waited_for_in_any_order(order: str) -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    late: list[Packet] = []
    net.drop = lambda packet: (
        isinstance(packet.body, TransferDone) and order == "ended first" and late.append(packet) is None
    )
    prefill.end_jobs()
    net.pump()
    pair.receiver.abort(CLIENT_LEFT)
    pair.drop_requests()
    net.pump()
    assert decode.free == (13, 3)
    net.drop = lambda packet: False
    net.pass_time(3.0)
    assert len(decode.engine.expected) == 1 and decode.free == (13, 3)
    decode.kv.handle(Notified(pair.receiver.key, 0))
    net.pass_time(3.0)
    assert_quiet_and_free(prefill, decode)
    assert bool(late) == (order == "ended first")


def test_a_transfer_that_failed_keeps_its_pages_until_what_was_written_is_there() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 2)
    pair.sender.send(pair.mine[0], 3)
    well, badly = prefill.engine.jobs
    prefill.kv.handle(CopyDone.of(well, None, settled=True, write_s=0.1))
    prefill.kv.handle(CopyDone.of(badly, BROKEN, settled=True, write_s=0.1))
    net.pump()
    assert pair.receiver.failure == BROKEN
    pair.drop_requests()
    net.pump()
    key = pair.receiver.key
    assert decode.engine.expected == [(key, 0, 1)] and decode.free == (13, 3)
    decode.kv.handle(Notified(key, 0))
    assert_quiet_and_free(prefill, decode)


def test_a_sender_that_dies_before_the_notes_have_come_fails_the_room_and_frees_its_pages() -> None:
    _, _, decode, pair = sent()
    decode.kv.handle(PeerGone("prefill-1"))
    assert pair.receiver.poll() is KVPoll.FAILED
    pair.receiver.close()
    for lease in pair.theirs:
        lease.drop("request")
    assert decode.free == (13, 3)
    decode.kv.handle(Notified(pair.receiver.key, 0))
    assert decode.free == (16, 4)
    decode.kv.handle(Notified(pair.receiver.key, 0))  # its room is gone


def test_pages_of_a_missing_note_rest_also_where_the_sender_has_gone_and_no_fence_ends_it() -> None:
    net, prefill, decode, pair = sent()
    decode.engine.fences = False
    decode.kv.handle(PeerGone("prefill-1"))
    net.sides.pop(prefill.endpoint)
    pair.receiver.close()
    for lease in pair.theirs:
        lease.drop("request")
    net.pass_time(1.0)
    decode.kv.handle(Notified(pair.receiver.key, 1))
    net.pass_time(DRAIN_TIMEOUT_S - 0.5)
    assert decode.free == (13, 3)
    net.pass_time(1.0)
    assert decode.free == (16, 4)


@pytest.mark.parametrize("notified", [(), (1, 1), (1, 1, 1)])
def test_a_done_that_speaks_of_other_ranks_than_there_are_is_not_believed(notified: tuple[int, ...]) -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    done = TransferDone(key=pair.receiver.key, stats=TransferStats(), notified=notified)
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


def test_writes_that_fail_on_purpose_are_not_notified_of() -> None:
    hub, peers = MemoryHub(), dict[str, NotifyingMemory]()
    memory = np.arange(16, dtype=np.uint8)
    inner, receiver = NotifyingMemory(hub, peers), NotifyingMemory(hub, peers)
    for transport, half in ((inner, memory[:8]), (receiver, memory[8:])):
        transport.register([MemoryRegion(half.ctypes.data, 8)])
    copies = [Copy(memory.ctypes.data, memory.ctypes.data + 8, 8)]
    with pytest.raises(TransferError, match="injected"):
        FailingTransport(inner, 1.0).write_and_notify(receiver.address(), copies, b"note")
    assert list(receiver.take_notifications()) == []
    well = FailingTransport(inner, 0.0)
    well.write_and_notify(receiver.address(), copies, b"note")
    assert well.facts.notifies and list(FailingTransport(receiver, 1.0).take_notifications()) == [b"note"]
