"""Handshakes, refusals, delivery, heartbeats; and the difference between silent, busy and gone."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pdserve.errors import HandshakeError
from pdserve.protocol.failure import Failure
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import FrameArrived, PeerGone, PeerListens, PrefillNotFound
from pdserve.transfer.peers import PeerState, check_facts
from pdserve.transfer.sessions import ACK_DELAY_S
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import MAX_ACKS, Ack, Done, Hello, Key, Meta, Packet, Refusal, TransferStats, Wire
from tests.unit.transfer.kit import ADDRESS, FACTS, HEARTBEAT_S, MISSES, TOKEN, Net, Side, found, meet

SILENCE_S = HEARTBEAT_S * (MISSES + 1) + 1


def _state(side: Side, instance: str) -> PeerState | None:
    peer = side.kv.sessions.peer(instance)
    return None if peer is None else peer.state


def test_a_handshake_makes_both_ready_and_is_acknowledged() -> None:
    _, prefill, decode = meet()
    assert _state(decode, "prefill-1") is PeerState.READY
    assert _state(prefill, "decode-1") is PeerState.READY
    assert prefill.kv.quiet and decode.kv.quiet


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
    for side, other in ((prefill, decode), (decode, prefill)):
        assert _state(side, other.instance) is None
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
    assert _state(prefill, "decode-1") is PeerState.READY
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
    meta = Meta(key=Key(1, 1, "x"), pages=((1,),), aux_slot=0, prompt_digest="d")
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(Packet(sender="x", receiver="prefill-1", seq=1, body=meta))))
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
    assert _state(prefill, "decode-1") is _state(decode, "prefill-1") is PeerState.READY
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
    assert _state(decode, "prefill-1") is PeerState.SILENT
    assert ("prefill-1", prefill.endpoint) in decode.directory.probes
    net.sides[prefill.endpoint] = prefill
    net.pass_time(HEARTBEAT_S + 1)
    assert _state(decode, "prefill-1") is PeerState.READY


def test_a_busy_peer_that_still_listens_is_not_given_up_for_a_while() -> None:
    net, prefill, decode = meet()
    del net.sides[prefill.endpoint]
    for _ in range(8):
        net.pass_time(HEARTBEAT_S)
        decode.kv.handle(PeerListens("prefill-1"))
    assert _state(decode, "prefill-1") is PeerState.READY
    for _ in range(10 * MISSES):
        net.pass_time(HEARTBEAT_S)
        decode.kv.handle(PeerListens("prefill-1"))
    assert _state(decode, "prefill-1") is PeerState.SILENT, "stopped, not busy"


def test_a_long_step_of_ours_is_no_silence_of_the_peer() -> None:
    net, _, decode = meet()
    net.clock.advance(50)
    decode.kv.tick()
    assert _state(decode, "prefill-1") is PeerState.READY
    net.pass_time(5)
    assert decode.kv.counters["peers_lost"] == 0


def test_a_dead_peer_is_forgotten_with_its_socket_and_its_transport() -> None:
    net, prefill, decode = meet()
    decode.kv.handle(PeerGone("prefill-1"))
    assert _state(decode, "prefill-1") is None
    assert decode.socket.forgotten == [prefill.endpoint]
    assert decode.engine.forgotten == ["prefill-1"]
    decode.kv.handle(PeerGone("prefill-1"))
    assert decode.kv.counters["peers_lost"] == 1
    net.pump()


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
    assert _state(decode2, "prefill-1") is None and _state(decode2, "prefill-2") is PeerState.READY


def test_a_new_instance_behind_an_old_endpoint_means_the_old_is_gone_and_not_the_other_way_round() -> None:
    net, prefill, decode = meet()
    hello = next(p for p in net.seen if p.sender == "decode-1" and isinstance(p.body, Hello))
    reborn = Side(net, "decode-2", endpoint=decode.endpoint)
    reborn.kv.sessions.dial(ADDRESS)
    found(reborn, prefill)
    net.pump()
    assert _state(prefill, "decode-1") is None and _state(prefill, "decode-2") is PeerState.READY
    prefill.kv.handle(FrameArrived(Wire(TOKEN).encode(hello)))
    assert _state(prefill, "decode-2") is PeerState.READY, "a late word of the dead must not kill its successor"
    assert _state(prefill, "decode-1") is None


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
    (meta,) = _deliver(net)
    sender.finish(mine[1], AuxRecord(7, 0, 42), TransferStats(), lease=mine[0], num_pages=3)
    (job,) = prefill.engine.jobs
    pages, aux = job.pieces
    assert sum(copy.num_bytes for copy in pages[2]) == 3 * prefill.kv.args.layout.groups[0].page_bytes
    assert aux[0] == prefill.kv.args.aux.buffer[0] and not net.frames
    assert mine[0].held_by("send") and mine[1].held_by("send")
    prefill.end_jobs()
    (done,) = _deliver(net)
    assert isinstance(meta.body, Meta) and isinstance(done.body, Done) and done.acks == (meta.seq,)
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
    assert decode.kv.take_moved() == list(range(len(names)))
