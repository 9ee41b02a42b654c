"""Handshakes, refusals, delivery, heartbeats; and the difference between silent, busy and gone."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from pdserve.errors import HandshakeError
from pdserve.protocol.failure import Failure
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.delivery import ACK_DELAY_S
from pdserve.transfer.events import (
    FrameArrived,
    PeerGone,
    PeerHandshakeFailed,
    PeerListens,
    PrefillNotFound,
    ReceiverOpened,
)
from pdserve.transfer.peers import PeerState, check_facts
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import (
    MAX_ACKS,
    Abort,
    Ack,
    Hello,
    MemoryKey,
    Packet,
    Ping,
    Pong,
    RankMemory,
    Refusal,
    Reset,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
    Wire,
)
from tests.unit.transfer.kit import (
    ADDRESS,
    FACTS,
    HEARTBEAT_S,
    MISSES,
    TOKEN,
    Net,
    Pair,
    Side,
    assert_quiet_and_free,
    found,
    hello_of,
    meet,
    say,
    state_of,
)

SILENCE_S = HEARTBEAT_S * (MISSES + 1) + 1


def test_a_handshake_makes_both_ready_and_is_acknowledged() -> None:
    _, prefill, decode = meet()
    assert state_of(decode, "prefill-1") is PeerState.READY
    assert state_of(prefill, "decode-1") is PeerState.READY
    assert prefill.kv.quiet and decode.kv.quiet


def test_an_engine_accepts_connections_from_the_hosts_of_its_peer_alone() -> None:
    net = Net()
    net.sources = {"prefill-1": "192.0.2.9", "decode-1": "192.0.2.10"}
    prefill = Side(net, "prefill-1", endpoint="[fd00::3]:1", host_addresses=("10.0.0.4", "192.0.2.9", "10.0.0.5"))
    decode = Side(net, "decode-1", host_addresses=("10.0.0.6",))
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    assert decode.engine.allowed == [(0, "prefill-1#1", ("fd00::3",))], "before the peer hears of the engine"
    net.pump()
    assert decode.engine.allowed[1:] == [(0, "prefill-1#1", ("192.0.2.9", "10.0.0.4", "10.0.0.5"))]
    answer = next(packet for packet in net.seen if packet.sender == "prefill-1" and isinstance(packet.body, Hello))
    assert prefill.engine.allowed == []
    decode.engine.fences = False
    decode.kv.handle(PeerGone("prefill-1"))
    decode.kv.handle(FrameArrived(Wire(TOKEN).encode(answer), "192.0.2.66"))
    assert len(decode.engine.allowed) == 2, "the session has ended"


def test_of_each_rank_the_first_address_comes_before_the_second_ones() -> None:
    """Engines use a bounded number of them."""
    net, prefill, _ = meet()
    answer = next(packet.body for packet in net.seen if isinstance(packet.body, Hello))
    own = [("10.0.0.1", "10.96.0.1", "10.96.0.2"), (), ("10.0.0.2", "10.96.0.1")]
    ranks = tuple(RankMemory("", (), addresses) for addresses in own)
    receivers = SessionReceivers(prefill.engine, net.clock, 1)
    receivers.open("session", "10.0.0.1:1")
    receivers.allow("session", "192.0.2.9", msgspec.structs.replace(answer, ranks=ranks))
    assert prefill.engine.allowed[-1][2] == ("192.0.2.9", "10.0.0.1", "10.0.0.2", "10.96.0.1", "10.96.0.2")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"page_tokens": 8}, "page_size"),
        ({"num_layers": 4}, "num_layers"),
        ({"facts": FACTS | {"model": "other"}}, "model"),
        ({"facts": FACTS | {"transfer_backend": "other"}}, "transfer_backend"),
        ({"dtype": "float16"}, "kv_cache_dtype"),
        ({"facts": FACTS | {"news": 1}}, "news"),
        ({"facts": {"model": "m"}}, "transfer_backend"),
    ],
)
def test_a_peer_that_differs_is_refused_by_the_name_of_the_field_on_both_sides(
    changes: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1", **changes)
    receiver = decode.kv.open_receiver(1, ADDRESS, "d")
    found(decode, prefill)
    net.pump()
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.failure is not None and receiver.failure.code == "handshake_refused"
    assert receiver.failure.message.startswith(f"{field}: ") and not receiver.failure.retryable
    assert any(isinstance(b, Refusal) and b.field == field for b in net.said(Refusal))
    for side in (prefill, decode):
        assert side.kv.counters["handshakes_refused"] == 1
    assert sum(f"refused: {field}" in record.getMessage() for record in caplog.records) == 2


def test_a_refused_peer_is_forgotten_and_may_try_again() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1", page_tokens=8)
    for _ in range(2):
        receiver = decode.kv.open_receiver(1, ADDRESS, "d")
        found(decode, prefill)
        net.pump()
        assert receiver.poll() is KVPoll.FAILED
        receiver.close()
        net.pass_time(2 * HEARTBEAT_S)
    net.pass_time(3 * HEARTBEAT_S)
    for side, other in ((prefill, decode), (decode, prefill)):
        assert state_of(side, other.instance) is None
        assert other.endpoint in side.socket.forgotten, "its socket must be closed"
        assert side.kv.quiet
    assert len(decode.directory.finds) == 2


def test_facts_are_compared_both_ways() -> None:
    check_facts({"a": 1}, {"a": 1})
    for ours, theirs, field in (({"a": 1}, {"a": 2}, "a"), ({"a": 1, "b": 2}, {"a": 1}, "b"), ({}, {"c": 1}, "c")):
        with pytest.raises(HandshakeError) as caught:
            check_facts(ours, theirs)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_junk_and_wrongly_sealed_frames_are_counted_and_change_nothing() -> None:
    net, prefill, decode = meet()
    stranger = Packet(sender="decode-1", receiver="prefill-1", seq=1, body=Ack(), acks=(1,))
    for frame in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100), Wire("guess").encode(stranger)):
        prefill.kv.handle(FrameArrived(frame))
    assert prefill.kv.counters["control_frames_refused"] == 4
    net.pump()
    assert state_of(prefill, "decode-1") is PeerState.READY
    assert decode.kv.counters["control_frames_refused"] == 0


def test_a_flood_of_junk_is_counted_whole_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    _, prefill, _ = meet()
    for _ in range(1000):
        prefill.kv.handle(FrameArrived(b"junk"))
    assert prefill.kv.counters["control_frames_refused"] == 1000
    assert 0 < len(caplog.records) < 20


def test_frames_for_another_instance_are_counted_and_dropped() -> None:
    _, prefill, _ = meet()
    packet = Packet(sender="decode-1", receiver="prefill-0", seq=1, body=Ack(), acks=(1,))
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(packet)))
    assert prefill.kv.counters["control_frames_misaddressed"] == 1


def test_a_room_message_without_a_handshake_is_not_believed() -> None:
    net = Net()
    prefill = Side(net, "prefill-1")
    info = TransferInfo(key=MemoryKey(1, 1, "x"), cached_tokens=0, pages=((1,),), aux_slot=0, prompt_digest="d")
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(Packet(sender="x", receiver="prefill-1", seq=1, body=info))))
    assert prefill.kv.counters["control_frames_unexpected"] == 1
    assert prefill.kv.quiet and not net.frames


def test_messages_are_repeated_until_acknowledged_and_no_longer() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    lost = [True] * 5
    net.drop = lambda packet: isinstance(packet.body, Hello | Ack) and bool(lost) and lost.pop()
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pass_time(10)
    assert state_of(prefill, "decode-1") is state_of(decode, "prefill-1") is PeerState.READY
    assert prefill.kv.quiet and decode.kv.quiet
    hellos = len(net.said(Hello))
    net.pass_time(10)
    assert len(net.said(Hello)) == hellos


def test_many_waiters_ask_the_directory_once() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    receivers = [decode.kv.open_receiver(room, ADDRESS, "d") for room in range(20)]
    net.pass_time(2)
    assert decode.directory.finds == [ADDRESS]
    found(decode, prefill)
    net.pump()
    assert {receiver.poll() for receiver in receivers} == {KVPoll.WAITING_FOR_INPUT}


def test_an_address_that_nobody_answers_fails_who_waits_and_is_asked_again_later() -> None:
    net = Net()
    decode = Side(net, "decode-1")
    receiver = decode.kv.open_receiver(1, ADDRESS, "d")
    failure = Failure(code="bootstrap_unreachable", message="nothing there")
    decode.kv.handle(PrefillNotFound(ADDRESS, failure))
    assert receiver.poll() is KVPoll.FAILED and receiver.failure == failure
    receiver.close()
    decode.kv.open_receiver(1, ADDRESS, "d")
    assert decode.directory.finds == [ADDRESS, ADDRESS]


def test_a_peer_that_answers_nothing_is_silent_then_comes_back() -> None:
    net, prefill, decode = meet()
    del net.sides[prefill.endpoint]
    net.pass_time(SILENCE_S)
    assert state_of(decode, "prefill-1") is PeerState.SILENT
    assert ("prefill-1", prefill.endpoint) in decode.directory.probes
    net.sides[prefill.endpoint] = prefill
    net.pass_time(HEARTBEAT_S + 1)
    assert state_of(decode, "prefill-1") is PeerState.READY


def test_a_busy_peer_that_still_listens_is_not_given_up_for_a_while() -> None:
    net, prefill, decode = meet()
    del net.sides[prefill.endpoint]
    for _ in range(8):
        net.pass_time(HEARTBEAT_S)
        decode.kv.handle(PeerListens("prefill-1"))
    assert state_of(decode, "prefill-1") is PeerState.READY
    for _ in range(10 * MISSES):
        net.pass_time(HEARTBEAT_S)
        decode.kv.handle(PeerListens("prefill-1"))
    assert state_of(decode, "prefill-1") is PeerState.SILENT, "stopped, not busy"


def test_a_stopped_peer_is_given_up_although_its_directory_answers_each_request() -> None:
    """Only its scheduler stands still: its bootstrap server names it, and its host takes connections."""
    net, prefill, decode = meet()
    del net.sides[prefill.endpoint]
    states: list[PeerState] = []
    for _ in range(10 * MISSES + 30):
        net.pass_time(HEARTBEAT_S)
        if decode.kv.sessions.peer("prefill-1") is None:
            break
        decode.kv.handle(PeerListens("prefill-1"))
        states.append(state_of(decode, "prefill-1"))
        if states[-1] is PeerState.SILENT and states.count(PeerState.SILENT) % 3 == 0:
            decode.kv.sessions.dial(ADDRESS)  # another request
            found(decode, prefill)
    assert decode.kv.sessions.peer("prefill-1") is None, "it holds its pages for ever"
    assert states.count(PeerState.SILENT) >= 3 and PeerState.CONNECTING in states
    assert states.index(PeerState.SILENT) >= 10 * MISSES - 1, "a busy one is given time"


def test_a_long_step_of_ours_is_no_silence_of_the_peer() -> None:
    net, _, decode = meet()
    net.clock.advance(50)
    decode.kv.tick()
    assert state_of(decode, "prefill-1") is PeerState.READY
    net.pass_time(5)
    assert decode.kv.counters["peers_lost"] == 0


def test_a_dead_peer_is_forgotten_with_its_socket_and_its_transport() -> None:
    net, prefill, decode = meet()
    decode.kv.handle(PeerGone("prefill-1"))
    assert state_of(decode, "prefill-1") is None
    assert decode.engine.fenced == [(0, "prefill-1#1")]
    decode.kv.handle(PeerGone("prefill-1"))
    assert decode.kv.counters["peers_lost"] == 1
    del net.sides[prefill.endpoint]
    net.pass_time(3 * HEARTBEAT_S)
    assert decode.socket.forgotten == [prefill.endpoint]


def test_a_dead_receiver_s_transport_is_forgotten() -> None:
    net, prefill, decode = meet()
    del net.sides[decode.endpoint]
    prefill.kv.handle(PeerGone("decode-1"))
    assert prefill.engine.forgotten == ["decode-1"] and not prefill.engine.fenced
    net.pass_time(3 * HEARTBEAT_S)
    assert prefill.socket.forgotten == [decode.endpoint]


def test_a_new_instance_at_the_old_bootstrap_address_means_the_old_is_gone() -> None:
    net, _, decode = meet()
    reborn = Side(net, "prefill-2")
    decode.kv.handle(PeerGone("prefill-1"))
    decode.kv.sessions.dial(ADDRESS)
    found(decode, reborn)
    net.pump()
    assert decode.kv.sessions.dial(ADDRESS) == (decode.kv.sessions.peer("prefill-2"),)
    net2, _, decode2 = meet()
    found(decode2, Side(net2, "prefill-2"))
    net2.pump()
    assert state_of(decode2, "prefill-1") is None and state_of(decode2, "prefill-2") is PeerState.READY


def test_a_new_instance_behind_an_old_endpoint_means_the_old_is_gone_and_not_the_other_way_round() -> None:
    net, prefill, decode = meet()
    hello = next(p for p in net.seen if p.sender == "decode-1" and isinstance(p.body, Hello))
    reborn = Side(net, "decode-2", endpoint=decode.endpoint)
    reborn.kv.sessions.dial(ADDRESS)
    found(reborn, prefill)
    net.pass_time(3)
    assert state_of(prefill, "decode-1") is None and state_of(prefill, "decode-2") is PeerState.READY
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(hello)))
    assert state_of(prefill, "decode-2") is PeerState.READY, "a late word of the dead must not kill its successor"
    assert state_of(prefill, "decode-1") is None


def test_a_stranger_with_another_s_endpoint_changes_nothing() -> None:
    """It knows the token. It does not receive what is sent to that endpoint, so it cannot repeat the nonce."""
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    forged = msgspec.structs.replace(hello_of(net, decode), session=5)
    for number in range(300):
        for _ in range(2):
            say(net, f"usurper-{number}", prefill, forged, session=5)
            say(net, f"usurper-{number}", prefill, Pong(nonce=number + 1), session=0)
    net.pass_time(2 * SILENCE_S)
    assert state_of(prefill, "decode-1") is state_of(decode, "prefill-1") is PeerState.READY
    assert [peer.instance for peer in prefill.kv.sessions] == ["decode-1"]
    assert prefill.kv.counters["peers_lost"] == 0
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS


def test_a_peer_cannot_speak_for_another_without_the_number_of_its_session() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    key = pair.receiver.key
    failure = Failure(code="forged", message="")
    for session in (0, 1):
        say(net, "prefill-1", decode, TransferDone(key=key, stats=TransferStats()), session=session)
        say(net, "prefill-1", decode, TransferEnded(key=key, failure=failure, quiesced=True), session=session)
        say(net, "prefill-1", decode, Reset(endpoint="", quiesced=True, answer=True), session=session)
        say(net, "decode-1", prefill, Abort(key=key, failure=failure, prompt_digest="d"), session=session)
    assert pair.receiver.poll() is pair.sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert decode.free == (13, 3)


def test_a_peer_that_was_taken_for_gone_ends_its_session_too_and_is_taken_back() -> None:
    for victim in ("prefill", "decode"):
        net, prefill, decode = meet()
        pair = Pair(net, prefill, decode)
        believer, other = (prefill, decode) if victim == "decode" else (decode, prefill)
        believer.kv.handle(PeerGone(other.instance))
        net.pump()
        for half in (pair.receiver, pair.sender):
            assert half.failure is not None and half.failure.code == "peer_gone"
        pair.drop_requests()
        net.pass_time(3)
        assert state_of(prefill, "decode-1") is state_of(decode, "prefill-1") is None
        assert_quiet_and_free(prefill, decode)
        receiver = decode.kv.open_receiver(8, ADDRESS, "d")
        found(decode, prefill)
        net.pump()
        assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
        assert state_of(prefill, "decode-1") is PeerState.READY


def test_a_lost_reset_is_made_up_for_by_the_next_heartbeat() -> None:
    net, prefill, decode = meet()
    net.drop = lambda packet: isinstance(packet.body, Reset)
    prefill.kv.handle(PeerGone("decode-1"))
    net.pump()
    net.drop = lambda packet: False
    assert state_of(decode, "prefill-1") is PeerState.READY
    net.pass_time(2 * HEARTBEAT_S)
    assert state_of(decode, "prefill-1") is None


def test_messages_of_a_session_that_has_ended_do_not_reach_the_next_one() -> None:
    """A TransferInfo that was on its way names pages that are somebody else's by now."""
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    (info,) = [p for p in net.seen if isinstance(p.body, TransferInfo)]
    hello = next(p for p in net.seen if p.sender == "decode-1" and isinstance(p.body, Hello))
    pair.sender.close()
    decode.kv.handle(PeerGone("prefill-1"))
    net.pump()
    decode.kv.open_receiver(8, ADDRESS, "d")
    found(decode, prefill)
    net.pump()
    again = prefill.kv.open_sender(7, ADDRESS[0], "d", num_tokens=12)
    for packet in (hello, info, hello, info):
        prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(packet)))
        net.pump()
    assert again.poll() is KVPoll.BOOTSTRAPPING and prefill.kv.send_side.num_early == 0
    assert prefill.kv.counters["hellos_replayed"] == 2
    peer = prefill.kv.sessions.peer("decode-1")
    assert peer is not None and peer.state is PeerState.READY
    assert peer.session not in (0, hello.body.session)


def test_a_heartbeat_of_an_unknown_process_is_answered_with_a_reset_now_and_then() -> None:
    net = Net()
    prefill = Side(net, "prefill-1")
    for _ in range(50):
        say(net, "unknown-1", prefill, Ping(endpoint="unknown:1"), session=9)
    assert [p.session for p in net.seen if isinstance(p.body, Reset)] == [9]
    net.pass_time(3 * HEARTBEAT_S)
    assert prefill.socket.forgotten == ["unknown:1"] and prefill.kv.quiet


def test_another_control_token_at_a_known_address_fails_who_waits_by_name() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    net.drop = lambda packet: True
    receiver = decode.kv.open_receiver(1, ADDRESS, "d")
    found(decode, prefill)
    net.pump()
    decode.kv.sessions.handshake_failed("elsewhere:1")
    assert receiver.poll() is KVPoll.BOOTSTRAPPING
    decode.kv.handle(PeerHandshakeFailed(prefill.endpoint))
    assert receiver.failure is not None and receiver.failure.code == "handshake_refused"
    assert "PDSERVE_CONTROL_TOKEN" in receiver.failure.message and not receiver.failure.retryable


def test_receiving_engines_that_do_not_start_fail_the_rooms_that_wait_for_them() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    receiver = decode.kv.open_receiver(1, ADDRESS, "d")
    found(decode, prefill)
    decode.engine.events.clear()
    failure = Failure(code="engine_failed", message="no memory can be registered")
    decode.kv.handle(ReceiverOpened("prefill-1#1", "", failure))
    assert receiver.failure == failure and state_of(decode, "prefill-1") is None
    assert decode.engine.fenced == [(0, "prefill-1#1")]
    receiver.close()
    net.pump()
    assert decode.kv.quiet and not net.said(Hello)


def test_two_names_of_one_prefill_server_both_work_and_both_are_looked_up_again_after_its_death() -> None:
    net, prefill, decode = meet()
    other = ("localhost", 8998)
    receiver = decode.kv.open_receiver(1, other, "d")
    found(decode, prefill, other)
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
    decode.kv.handle(PeerGone("prefill-1"))
    assert receiver.poll() is KVPoll.FAILED
    receiver.close()
    reborn = Side(net, "prefill-2")
    for room, address in ((2, ADDRESS), (3, other)):
        again = decode.kv.open_receiver(room, address, "d")
        assert decode.directory.finds[-1] == address
        found(decode, reborn, address)
        net.pump()
        assert again.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_prefill_server_that_never_shakes_hands_fails_its_rooms_soon() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    del net.sides[prefill.endpoint]
    for room in (1, 2):
        receiver = decode.kv.open_receiver(room, ADDRESS, "d")
        found(decode, prefill)
        net.pass_time(SILENCE_S)
        assert receiver.poll() is KVPoll.FAILED
        assert receiver.failure is not None and receiver.failure.code == "peer_silent"
        receiver.close()


def _deliver(net: Net) -> list[Packet]:
    """What is on its way arrives, and nothing else happens."""
    frames, net.frames = net.frames, []
    for endpoint, frame in frames:
        net.sides[endpoint].kv.handle(FrameArrived(frame))
    return [Wire(TOKEN).decode(frame) for _, frame in frames]


def test_a_transfer_is_one_job_and_two_frames_and_acks_ride_or_follow_soon() -> None:
    net, prefill, decode = meet()
    receiver, theirs = decode.kv.open_receiver(7, ADDRESS, "d"), decode.leases()
    sender, mine = prefill.kv.open_sender(7, ADDRESS[0], "d", num_tokens=12), prefill.leases()
    receiver.publish(*theirs)
    (info,) = _deliver(net)
    sender.finish(mine[1], AuxRecord(7, 0, 42), TransferStats(), lease=mine[0], num_pages=3)
    (job,) = prefill.engine.jobs
    pages, aux = job.pieces
    assert sum(copy.num_bytes for copy in pages[2]) == 3 * prefill.kv.args.layout.groups[0].page_bytes
    assert aux[0] == prefill.kv.args.aux.buffer[0] and not net.frames
    assert mine[0].held_by("send") and mine[1].held_by("send")
    prefill.end_jobs()
    (done,) = _deliver(net)
    assert isinstance(info.body, TransferInfo) and isinstance(done.body, TransferDone) and done.acks == (info.seq,)
    assert receiver.poll() is sender.poll() is KVPoll.SUCCESS and not decode.kv.sessions.num_unacked
    assert not mine[0].held_by("send") and not mine[1].held_by("send")
    assert not decode.kv.quiet, "it owes an ack, and must not sleep for long"
    net.clock.advance(ACK_DELAY_S)
    decode.kv.tick()
    (ack,) = _deliver(net)
    assert isinstance(ack.body, Ack) and ack.acks == (done.seq,) and not prefill.kv.sessions.num_unacked


def test_acks_do_not_wait_for_company_for_ever() -> None:
    net, prefill, decode = meet()
    peer = decode.kv.sessions.peer("prefill-1")
    assert peer is not None
    for _ in range(MAX_ACKS):
        decode.kv.sessions.send(peer, Refusal(field="f", message="m"))
    _deliver(net)
    (ack,) = _deliver(net)
    assert len(ack.acks) == MAX_ACKS and not decode.kv.sessions.num_unacked
    assert not prefill.kv.sessions.owes_acks


def test_rooms_of_one_peer_by_several_names_go_on_in_the_order_in_which_these_were_found() -> None:
    """On every rank of a replica alike, whatever their hashes."""
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    names = [(f"name-{number}", 1) for number in (3, 1, 4, 5, 9, 2, 6)]
    receivers = [decode.kv.open_receiver(room, name, "d") for room, name in enumerate(names)]
    for name in names:
        found(decode, prefill, name)
    net.pump()
    assert all(receiver.poll() is KVPoll.WAITING_FOR_INPUT for receiver in receivers)
    assert decode.kv.drain_state_changes(sending=False) == list(range(len(names)))
