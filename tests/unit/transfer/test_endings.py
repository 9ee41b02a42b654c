"""How keys end, well or badly, and until when the pages of both sides are held."""

from __future__ import annotations

import pytest

from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import FrameArrived, PeerGone
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import (
    Abort,
    Packet,
    Ping,
    Reset,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
    Wire,
)
from tests.unit.transfer.kit import (
    ADDRESS,
    ALL_FREE,
    BROKEN,
    CLIENT_LEFT,
    DRAIN_TIMEOUT_S,
    HEARTBEAT_S,
    TOKEN,
    WAITING_S,
    Pair,
    Side,
    assert_quiet_and_free,
    found,
    meet,
    say,
)


def test_pages_outlive_an_aborted_receiver_until_the_sender_is_quiet() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3)
    pair.receiver.abort(CLIENT_LEFT)
    pair.drop_requests()
    net.pump()
    assert decode.free == (13, 3) and prefill.free == (13, 4), "a copy still runs"
    assert prefill.engine.jobs[0].cancelled
    net.pass_time(30)
    assert decode.free == (13, 3)
    prefill.end_jobs(BROKEN)
    net.pump()
    assert_quiet_and_free(prefill, decode)
    assert prefill.kv.counters["copies_failed"] == 0, "a cancelled copy is no failed one"


def test_an_unsettled_copy_holds_both_sides_for_as_long_as_it_may_move() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs(BROKEN, settled=False)
    net.pump()
    assert pair.sender.failure == BROKEN and pair.receiver.failure == BROKEN, "the requests fail at once"
    assert prefill.kv.counters["copies_failed"] == 1
    pair.drop_requests()
    net.pass_time(DRAIN_TIMEOUT_S - 1)
    assert prefill.free != ALL_FREE and decode.free != ALL_FREE
    net.pass_time(2)
    assert_quiet_and_free(prefill, decode)


def test_a_settled_failure_lets_go_at_once() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    prefill.end_jobs(BROKEN)
    net.pump()
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)


def test_a_repeated_report_of_a_copy_counts_once() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    first = prefill.engine.jobs[0]
    prefill.engine.jobs = [first, first, first]
    prefill.end_jobs()
    net.pump()
    assert pair.sender.poll() is KVPoll.TRANSFERRING, "the aux slot is still on its way"


def test_pages_from_which_two_keys_read_are_held_until_both_have_ended() -> None:
    """As a migration and its last stage."""
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.send()
    stage, prefill.engine.jobs = prefill.engine.jobs, []
    other = Pair(net, prefill, decode, room=8, digest="e")
    other.sender.send(pair.mine[0], 3)
    other.sender.finish(other.mine[1], AuxRecord(8, 0, 43), TransferStats())
    held = prefill.kv.counts()["pages_held_send"]
    rest, prefill.engine.jobs = prefill.engine.jobs, stage
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS
    pair.drop_requests()
    assert pair.mine[0].alive, "copies for the other key still read from it"
    assert prefill.kv.counts()["pages_held_send"] < held
    prefill.engine.jobs = rest
    prefill.end_jobs()
    net.pump()
    assert not pair.mine[0].alive
    other.drop_requests()
    assert_quiet_and_free(prefill, decode)


def test_an_abort_of_a_stranger_is_ignored_and_so_are_its_endings() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    key = pair.receiver.key
    for number, side in enumerate((prefill, decode)):
        stranger = Side(net, f"stranger-{number}")
        found(stranger, side)
        net.pump()
        for body in (
            Abort(key=key, failure=CLIENT_LEFT, prompt_digest="d"),
            TransferEnded(key=key, failure=CLIENT_LEFT, quiesced=True),
            TransferDone(key=key, stats=TransferStats()),
        ):
            say(net, stranger.instance, side, body)
    assert pair.sender.poll() is KVPoll.WAITING_FOR_INPUT and pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    assert all(lease.held_by("remote") for lease in pair.theirs)


def test_a_closed_key_never_reopens() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    old = next(p for p in net.seen if isinstance(p.body, TransferInfo))
    pair.receiver.abort(CLIENT_LEFT)
    net.pump()
    pair.drop_requests()
    again = prefill.kv.open_sender(7, ADDRESS[0], "d")
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(old)))
    assert again.poll() is KVPoll.BOOTSTRAPPING


def test_a_key_that_is_still_being_stopped_is_not_taken_for_a_new_one() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    info = next(p for p in net.seen if isinstance(p.body, TransferInfo))
    pair.sender.send(pair.mine[0], 3)
    pair.sender.abort(CLIENT_LEFT)
    pair.drop_requests()
    again = Packet(sender=info.sender, receiver=info.receiver, seq=1 << 40, body=info.body)
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(again)))
    assert prefill.kv.counts()["keys_early"] == 0
    assert prefill.kv.open_sender(7, ADDRESS[0], "d").poll() is KVPoll.BOOTSTRAPPING


def test_kv_that_does_not_come_in_time_fails_with_504_and_stays_held() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3)
    net.pass_time(WAITING_S + 1)
    assert pair.receiver.failure is not None
    assert (pair.receiver.failure.code, pair.receiver.failure.status) == ("transfer_timeout", 504)
    assert pair.sender.poll() is KVPoll.FAILED
    pair.drop_requests()
    assert decode.free == (13, 3)
    prefill.end_jobs()
    net.pump()
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("drain_timeout_s", [0.0, DRAIN_TIMEOUT_S])
def test_pages_given_to_a_prefill_server_whose_port_refuses_are_fenced_first(drain_timeout_s: float) -> None:
    net, prefill, decode = meet()
    decode.engine.fence_drain_timeout_s = drain_timeout_s
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3)
    del net.sides[prefill.endpoint]
    decode.kv.handle(PeerGone("prefill-1"))
    assert pair.receiver.failure is not None and pair.receiver.failure.code == "peer_gone"
    pair.drop_requests()
    assert decode.engine.fenced == [(0, "prefill-1#1")] and decode.free == (13, 3), "the fence has not been reported"
    net.pump()
    if drain_timeout_s:
        net.pass_time(drain_timeout_s - 1)
        assert decode.free == (13, 3)
        net.pass_time(2)
    assert_quiet_and_free(decode)


def test_without_a_fence_pages_are_held_until_the_process_is_known_to_be_dead() -> None:
    net, prefill, decode = meet()
    decode.engine.fences = False
    pair = Pair(net, prefill, decode)
    del net.sides[prefill.endpoint]
    decode.kv.handle(PeerGone("prefill-1"))
    pair.drop_requests()
    net.pass_time(100)
    assert decode.free == (13, 3) and decode.kv.counts()["senders_unfenced"] == 1
    decode.engine.fences = True  # `shm`: the process has ended
    net.pass_time(3)
    assert_quiet_and_free(decode)


def test_without_a_fence_the_sender_s_promise_frees_the_pages() -> None:
    """Prefill lives after all. It is told that the session has ended, and promises quiet once its copy has ended."""
    net, prefill, decode = meet()
    decode.engine.fences = False
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3)
    decode.kv.handle(PeerGone("prefill-1"))
    net.pass_time(10)
    assert pair.sender.failure is not None and pair.sender.failure.code == "peer_gone"
    pair.drop_requests()
    net.pass_time(10)
    assert decode.free == (13, 3), "the copy still runs"
    prefill.end_jobs(BROKEN)
    net.pass_time(10)
    assert_quiet_and_free(prefill, decode)


def test_an_operator_s_word_frees_what_a_peer_holds() -> None:
    net, prefill, decode = meet()
    decode.engine.fences = False
    pair = Pair(net, prefill, decode)
    del net.sides[prefill.endpoint]
    decode.kv.handle(PeerGone("prefill-1"))
    pair.drop_requests()
    net.pass_time(100)
    assert decode.free == (13, 3)
    assert decode.kv.declare_dead("prefill-1") and not decode.kv.declare_dead("prefill-2")
    net.pump()
    assert_quiet_and_free(decode)


def test_a_silent_prefill_server_is_fenced_after_a_while() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    del net.sides[prefill.endpoint]
    net.pass_time(5 * HEARTBEAT_S)
    assert pair.receiver.failure is not None and pair.receiver.failure.code == "peer_silent"
    assert decode.kv.oldest_orphan_s() == 0.0, "the request has them still"
    pair.drop_requests()
    assert decode.free == (13, 3), "it may still write"
    assert decode.kv.oldest_orphan_s() == 0.0
    net.pass_time(SessionTimes().silent_timeout_s / 2)
    assert decode.kv.oldest_orphan_s() == SessionTimes().silent_timeout_s / 2
    net.pass_time(SessionTimes().silent_timeout_s / 2)
    assert decode.engine.fenced and decode.free == ALL_FREE
    assert decode.kv.oldest_orphan_s() == 0.0
    net.sides[prefill.endpoint] = prefill
    net.pass_time(10)
    assert_quiet_and_free(prefill, decode)
    receiver = decode.kv.open_receiver(8, ADDRESS, "d")
    found(decode, prefill)
    net.pump()
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT, "it is taken back, in a new session"


def test_a_new_process_at_the_endpoint_of_a_dead_one_ends_its_sessions_at_once() -> None:
    """As after a restart at the same port: probes connect, and no directory tells of another instance."""
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    successor = Side(net, "prefill-2", endpoint=prefill.endpoint)
    net.pass_time(HEARTBEAT_S + 1)
    assert pair.receiver.failure is not None and pair.receiver.failure.code == "peer_gone"
    pair.drop_requests()
    net.pass_time(1)
    assert_quiet_and_free(decode, successor)


def test_and_one_that_pretends_to_answer_for_an_endpoint_ends_none() -> None:
    net, prefill, decode = meet()
    peer = decode.kv.sessions.peer("prefill-1")
    assert peer is not None
    say(net, "x", decode, Reset(endpoint=prefill.endpoint, quiesced=True, answer=True), session=peer.session + 1)
    say(net, "x", decode, Reset(endpoint="x:1", quiesced=True, answer=True), session=peer.session)
    forged = Packet(sender="decode-1", receiver="x", session=peer.session, seq=0, body=Ping(endpoint=decode.endpoint))
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(forged)))
    net.pump()
    assert decode.kv.sessions.peer("prefill-1") is peer


def test_source_pages_for_a_dead_decode_server_are_held_until_the_copy_ended() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    pair.sender.send(pair.mine[0], 3)
    del net.sides[decode.endpoint]
    prefill.kv.handle(PeerGone("decode-1"))
    assert pair.sender.failure is not None and pair.sender.failure.code == "peer_gone"
    pair.drop_requests()
    assert prefill.free == (13, 4) and prefill.engine.jobs[0].cancelled
    prefill.end_jobs(BROKEN)
    assert_quiet_and_free(prefill)


def test_nothing_is_sent_twice_nor_after_a_failure() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    for num_pages in (1, 1, 0, 2):
        pair.sender.send(pair.mine[0], num_pages)
    assert len(prefill.engine.jobs) == 2
    pair.sender.abort(CLIENT_LEFT)
    pair.send()
    assert len(prefill.engine.jobs) == 2
    prefill.end_jobs(BROKEN)
    net.pump()
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)
