"""Rooms as `KVSender` and `KVReceiver` see them: opening, binding, refusing, waiting in vain."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import RequestError
from pdserve.transfer import in_flight as unmatched
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import PeerGone
from pdserve.transfer.manager import FAKE_BOOTSTRAP_HOST
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey, TransferEnded, TransferInfo, TransferStats, prompt_digest
from tests.unit.transfer.kit import (
    ADDRESS,
    BOOTSTRAP_S,
    CLIENT_LEFT,
    Net,
    Pair,
    Side,
    assert_quiet_and_free,
    meet,
    say,
)


def test_a_transfer_succeeds_and_leaves_nothing() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    assert pair.sender.poll() is KVPoll.WAITING_FOR_INPUT
    pair.sender.send(pair.mine[0], 2)
    assert pair.sender.poll() is KVPoll.TRANSFERRING
    pair.send()
    assert [job.num_bytes for job in prefill.engine.jobs][-1] == decode.kv.args.aux.slot_bytes
    assert pair.mine[0].held_by("send") and pair.mine[1].held_by("send")
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is pair.receiver.poll() is KVPoll.SUCCESS
    assert pair.receiver.stats.num_pages == 3 and pair.receiver.stats.prefill_s == 1.0
    assert not any(lease.held_by("send") for lease in pair.mine)
    assert not any(lease.held_by("remote") for lease in pair.theirs)
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("host", ["prefill", FAKE_BOOTSTRAP_HOST])
def test_a_live_room_is_refused_with_409_on_both_sides(host: str) -> None:
    _, prefill, decode = meet()
    sender = prefill.kv.open_sender(7, host, "d")
    receiver = decode.kv.open_receiver(7, (host, 1), "d")
    for again in (lambda: prefill.kv.open_sender(7, host, "e"), lambda: decode.kv.open_receiver(7, (host, 1), "e")):
        with pytest.raises(RequestError) as caught:
            again()
        assert (caught.value.status, caught.value.field) == (409, "bootstrap_room")
    sender.close()
    receiver.close()
    prefill.kv.open_sender(7, host, "e")
    decode.kv.open_receiver(7, (host, 1), "e")


def test_a_fake_room_goes_through_all_states_without_a_peer() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    sender = prefill.kv.open_sender(7, FAKE_BOOTSTRAP_HOST, "d")
    receiver = decode.kv.open_receiver(7, (FAKE_BOOTSTRAP_HOST, 1), "d")
    mine, theirs = prefill.leases(), decode.leases()
    receiver.publish(*theirs)
    sender.send(mine[0], 3)
    sender.finish(mine[1], AuxRecord(7, 0, 1), TransferStats())
    assert sender.poll() is receiver.poll() is KVPoll.SUCCESS
    assert receiver.take(theirs[1]) is not None
    assert not net.frames and not prefill.engine.jobs and not decode.directory.finds
    sender.close()
    receiver.close()
    for lease in (*mine, *theirs):
        lease.drop("request")
    assert_quiet_and_free(prefill, decode)


def test_metadata_of_another_room_or_attempt_is_not_taken() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    slot, key = pair.theirs[1], pair.receiver.key
    aux = decode.kv.args.aux
    for room, attempt in ((8, key.attempt), (7, key.attempt + 1), (0, 0)):
        aux.write(slot.pages[0], AuxRecord(room, attempt, 1))
        assert pair.receiver.take(slot) is None
    aux.write(slot.pages[0], AuxRecord(7, key.attempt, 1))
    assert pair.receiver.take(slot) is not None


def test_meta_that_comes_first_waits_for_its_request() -> None:
    net, prefill, decode = meet()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    receiver.publish(*decode.leases())
    net.pump()
    assert prefill.kv.counts()["keys_early"] == 1 and not prefill.kv.quiet
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d")
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert prefill.kv.counts()["keys_early"] == 0


def test_a_transfer_info_whose_request_never_comes_is_turned_away_with_504() -> None:
    net, prefill, decode = meet()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    leases = decode.leases()
    receiver.publish(*leases)
    net.pump()
    net.pass_time(BOOTSTRAP_S + 1)
    assert receiver.failure is not None
    assert (receiver.failure.code, receiver.failure.status) == ("bootstrap_timeout", 504)
    receiver.close()
    for lease in leases:
        lease.drop("request")
    assert_quiet_and_free(prefill, decode)


def test_a_receiver_whose_request_does_not_come_hears_of_the_end_of_the_session() -> None:
    """As where prefill changes its role: its half of the request was refused."""
    net, prefill, decode = meet()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    leases = decode.leases()
    receiver.publish(*leases)
    net.pump()
    prefill.kv.forget_early()
    assert prefill.kv.quiet
    prefill.kv.end_sessions()
    net.pump()
    assert receiver.failure is not None and receiver.failure.retryable
    receiver.close()
    for lease in leases:
        lease.drop("request")
    net.pump()
    assert_quiet_and_free(prefill, decode)


def test_early_infos_of_a_dead_peer_are_forgotten() -> None:
    net, prefill, decode = meet()
    decode.kv.open_receiver(7, ADDRESS, "d").publish(*decode.leases())
    net.pump()
    prefill.kv.handle(PeerGone("decode-1"))
    assert prefill.kv.quiet


@pytest.mark.parametrize(("bound", "most"), [("MAX_EARLY", 2), ("MAX_EARLY_PAGES", 2)])
def test_too_many_early_infos_are_turned_away(monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    """Each of them names one page."""
    monkeypatch.setattr(unmatched, bound, most)
    net, _, decode = meet()
    receivers = [decode.kv.open_receiver(room, ADDRESS, "d") for room in range(3)]
    for receiver in receivers:
        receiver.publish(*decode.leases(1))
    net.pump()
    assert [r.poll() for r in receivers] == [KVPoll.WAITING_FOR_INPUT] * 2 + [KVPoll.FAILED]
    assert receivers[2].failure is not None and receivers[2].failure.status == 503


def test_a_sender_that_gave_up_before_meta_came_tells_the_receiver_why() -> None:
    net, prefill, decode = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d")
    sender.abort(CLIENT_LEFT)
    sender.close()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    leases = decode.leases()
    receiver.publish(*leases)
    net.pump()
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.failure is not None and (receiver.failure.code, receiver.failure.status) == ("aborted", 499)
    receiver.close()
    for lease in leases:
        lease.drop("request")
    assert_quiet_and_free(prefill, decode)


def test_the_newest_tombstones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmatched, "MAX_TOMBSTONES", 5)
    _, prefill, _ = meet()
    for room in range(20):
        sender = prefill.kv.open_sender(room, ADDRESS[0], "d")
        sender.abort(CLIENT_LEFT)
        sender.close()
    assert prefill.kv.send_side.num_tombstones == 5


def test_tombstones_are_for_one_prompt_and_a_limited_time() -> None:
    net, prefill, decode = meet()
    for room in range(100):
        sender = prefill.kv.open_sender(room, ADDRESS[0], "d")
        sender.abort(CLIENT_LEFT)
        sender.close()
    other = decode.kv.open_receiver(3, ADDRESS, "another prompt")
    other.publish(*decode.leases())
    net.pump()
    assert other.poll() is KVPoll.WAITING_FOR_INPUT
    net.pass_time(BOOTSTRAP_S + 1)
    assert prefill.kv.send_side.num_tombstones == 0


def test_a_request_nobody_comes_for_times_out_with_504() -> None:
    net, prefill, _ = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d")
    net.pass_time(BOOTSTRAP_S - 1)
    assert sender.poll() is KVPoll.BOOTSTRAPPING
    net.pass_time(2)
    assert sender.failure is not None and (sender.failure.code, sender.failure.status) == ("bootstrap_timeout", 504)


def test_a_receiver_that_finds_no_prefill_server_times_out_with_504() -> None:
    net = Net()
    decode = Side(net, "decode-1")
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    net.pass_time(BOOTSTRAP_S + 1)
    assert receiver.failure is not None and receiver.failure.status == 504


def test_another_prompt_for_the_room_is_turned_away() -> None:
    net, prefill, decode = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], prompt_digest([1, 2]))
    receiver = decode.kv.open_receiver(7, ADDRESS, prompt_digest([1, 3]))
    receiver.publish(*decode.leases())
    net.pump()
    assert receiver.failure is not None and receiver.failure.code == "prompt_mismatch"
    assert sender.poll() is KVPoll.BOOTSTRAPPING, "a late TransferInfo of an earlier use must not fail this one"
    assert decode.kv.counts()["pages_held_remote"] == 0


def test_a_higher_attempt_of_the_same_receiver_supersedes_until_something_was_sent() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.receiver.close()
    second = decode.kv.open_receiver(7, ADDRESS, "d")
    pages = decode.leases()
    second.publish(*pages)
    net.pump()
    assert pair.sender.key == second.key
    pair.sender.send(pair.mine[0], 3)
    second.close()
    third = decode.kv.open_receiver(7, ADDRESS, "d")
    third.publish(*decode.leases())
    net.pump()
    assert third.failure is not None and third.failure.code == "room_in_use"


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({"pages": ((0, 16),)}, id="page outside the pool"),
        pytest.param({"pages": ()}, id="no group"),
        pytest.param({"pages": ((0,), (1,))}, id="one group too many"),
        pytest.param({"state_indices": ((0,),)}, id="a state that the layout lacks"),
        pytest.param({"aux_slot": 4}, id="slot outside the buffer"),
    ],
)
def test_pages_that_are_not_the_peers_are_refused_and_counted(info: dict[str, object]) -> None:
    net, prefill, _ = meet()
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d")
    good = TransferInfo(
        key=MemoryKey(7, 1, "decode-1"), cached_tokens=0, pages=((0, 1, 2),), aux_slot=0, prompt_digest="d"
    )
    say(net, "decode-1", prefill, msgspec.structs.replace(good, **info))
    assert prefill.kv.counters["metas_refused"] == 1
    assert sender.poll() is KVPoll.BOOTSTRAPPING
    ended = net.said(TransferEnded)[-1]
    assert isinstance(ended, TransferEnded) and ended.quiesced and ended.failure.code == "bad_metadata"


def test_fewer_pages_than_the_prompt_has_fail_the_request_and_nothing_else() -> None:
    net, prefill, decode = meet()
    receiver = decode.kv.open_receiver(7, ADDRESS, "d")
    receiver.publish(*decode.leases(2))
    sender = prefill.kv.open_sender(7, ADDRESS[0], "d")
    net.pump()
    sender.send(prefill.leases()[0], 3)
    net.pump()
    assert sender.poll() is receiver.poll() is KVPoll.FAILED
    assert not prefill.engine.jobs


@pytest.mark.parametrize("changed_first", ["prefill", "decode"])
def test_a_room_whose_sides_have_other_weights_fails_before_a_byte_is_out(changed_first: str) -> None:
    """When both sides have changed, rooms succeed."""
    net, prefill, decode = meet()
    for side in (prefill, decode):
        side.kv.change_weights("v1@f")
    first, second = (prefill, decode) if changed_first == "prefill" else (decode, prefill)
    first.kv.change_weights("v2@g")
    for room in (7, 8):
        pair = Pair(net, prefill, decode, room)
        assert pair.sender.poll() is pair.receiver.poll() is KVPoll.FAILED
        for failure in (pair.sender.failure, pair.receiver.failure):
            assert failure is not None and "v1@f" in failure.message and "v2@g" in failure.message
            assert (failure.code, failure.status, failure.retry_after_s) == ("weights_mismatch", 503, 1)
        pair.sender.send(pair.mine[0], 3)
        pair.drop_requests()
        assert prefill.engine.jobs == [], "nothing was written"
        assert_quiet_and_free(prefill, decode)
    second.kv.change_weights("v2@g")
    pair = Pair(net, prefill, decode, room=9)
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is pair.receiver.poll() is KVPoll.SUCCESS
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)
