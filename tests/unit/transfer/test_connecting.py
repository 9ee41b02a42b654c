"""Before a prompt is computed for a peer all our ranks can write to it; one that cannot fails the rooms at once."""

from __future__ import annotations

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import PeerConnected, PeerGone
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import RankMemory, WireRegion
from tests.unit.transfer.kit import ADDRESS, ALL_FREE, BOOTSTRAP_S, Net, Pair, Side, assert_quiet_and_free, found, meet

NO_WAY = Failure(code="peer_unreachable", message="no route", status=502)


def other(name: str) -> RankMemory:
    return RankMemory(name, (WireRegion(1 << 30, 1 << 20),))


def split(prefill_tp: int = 2, decode_tp: int = 2) -> tuple[Net, Side, Side]:
    """A pair of split servers, whose prefill ranks do not know yet whether they reach the others."""
    net = Net()
    sides = []
    for name, size in (("prefill-1", prefill_tp), ("decode-1", decode_tp)):
        others = [other(f"{name}.{rank}") for rank in range(1, size)]
        sides.append(Side(net, name, num_heads=2, shape=ParallelShape(tp_size=size), others=others))
    prefill, decode = sides
    prefill.engine.connects = False
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    return net, prefill, decode


def test_a_room_waits_until_all_our_ranks_reach_the_peer() -> None:
    net, prefill, decode = split()
    first = Pair(net, prefill, decode, room=7)
    second = Pair(net, prefill, decode, room=8)
    rank_pairs = [(0, "decode-1"), (1, "decode-1.1")]
    assert prefill.engine.asked == rank_pairs, "each rank the one that it feeds; once for both rooms"
    assert {first.sender.poll(), second.sender.poll()} == {KVPoll.BOOTSTRAPPING}
    prefill.kv.handle(PeerConnected("decode-1.1", None, 1))
    prefill.kv.handle(PeerConnected("decode-1.1", None, 1))
    prefill.kv.handle(PeerConnected("somebody", None, 0))
    assert first.sender.poll() is KVPoll.BOOTSTRAPPING
    prefill.kv.handle(PeerConnected("decode-1", None, 0))
    assert {first.sender.poll(), second.sender.poll()} == {KVPoll.WAITING_FOR_INPUT}
    third = Pair(net, prefill, decode, room=9)
    assert third.sender.poll() is KVPoll.WAITING_FOR_INPUT and prefill.engine.asked == rank_pairs, "known by now"


def test_every_rank_that_feeds_another_has_a_way_and_the_aux_slots_have() -> None:
    net, prefill, decode = split(prefill_tp=2, decode_tp=1)
    Pair(net, prefill, decode)
    assert prefill.engine.asked == [(0, "decode-1"), (1, "decode-1")]
    net, prefill, decode = split(prefill_tp=1, decode_tp=2)
    Pair(net, prefill, decode)
    assert prefill.engine.asked == [(0, "decode-1"), (0, "decode-1.1")]


def test_a_rank_that_cannot_reach_the_peer_fails_the_room_on_both_sides_and_is_asked_again() -> None:
    net, prefill, decode = meet()
    prefill.engine.connects = False
    pair = Pair(net, prefill, decode)
    prefill.kv.handle(PeerConnected("decode-1", NO_WAY))
    net.pump()
    assert pair.sender.poll() is pair.receiver.poll() is KVPoll.FAILED
    assert pair.sender.failure == NO_WAY and pair.receiver.failure is not None
    assert pair.receiver.failure.code == "peer_unreachable", "and says why there, too"
    assert not prefill.engine.jobs and not any(lease.held_by("remote") for lease in pair.theirs)
    pair.drop_requests()
    assert_quiet_and_free(prefill, decode)
    prefill.engine.connects = True
    assert Pair(net, prefill, decode, room=8).sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert len(prefill.engine.asked) == 2


def test_a_room_that_has_ended_meanwhile_stays_so() -> None:
    net, prefill, decode = meet()
    prefill.engine.connects = False
    gone, aborted = Pair(net, prefill, decode, room=7), Pair(net, prefill, decode, room=8)
    gone.sender.abort(NO_WAY)
    gone.sender.close()
    aborted.receiver.abort(NO_WAY)
    net.pump()
    assert aborted.sender.poll() is KVPoll.FAILED
    prefill.kv.handle(PeerConnected("decode-1", None))
    assert gone.sender.poll() is aborted.sender.poll() is KVPoll.FAILED


def test_a_peer_that_is_gone_is_asked_for_anew_when_it_comes_back() -> None:
    net, prefill, decode = meet()
    assert Pair(net, prefill, decode).sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert len(prefill.engine.asked) == 1
    prefill.kv.handle(PeerGone("decode-1"))
    net.pump()
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    assert Pair(net, prefill, decode, room=8).sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert prefill.engine.asked == [(0, "decode-1")] * 2


def test_an_answer_that_is_due_to_a_peer_that_is_gone_is_not_that_of_its_next_session() -> None:
    net, prefill, decode = meet()
    prefill.engine.connects = False
    Pair(net, prefill, decode)
    prefill.kv.handle(PeerGone("decode-1"))
    net.pump()
    prefill.kv.handle(PeerConnected("decode-1", NO_WAY))
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    sender = Pair(net, prefill, decode, room=8).sender
    assert sender.poll() is KVPoll.BOOTSTRAPPING and len(prefill.engine.asked) == 2
    prefill.kv.handle(PeerConnected("decode-1", None))
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT


def test_what_is_never_known_ends_with_the_time_for_bootstrapping() -> None:
    net, prefill, decode = meet()
    prefill.engine.connects = False
    pair = Pair(net, prefill, decode)
    net.pass_time(BOOTSTRAP_S + 1.0)
    failure = pair.sender.failure
    assert failure is not None and failure.code == "bootstrap_timeout"
    assert "the decode server could not be reached for room 7" in failure.message
    assert prefill.free != ALL_FREE  # the test's own leases
    pair.drop_requests()


@pytest.mark.parametrize("known", [True, False])
def test_what_an_engine_knows_at_once_costs_no_turn(known: bool) -> None:
    net, prefill, decode = meet()
    prefill.engine.connects = known
    state = Pair(net, prefill, decode).sender.poll()
    assert state is (KVPoll.WAITING_FOR_INPUT if known else KVPoll.BOOTSTRAPPING)
