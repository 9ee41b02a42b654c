"""Two processes that both send have two sessions, and a message of one session does nothing in the other."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import RequestError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import PeerGone, PrefillFound
from pdserve.transfer.peers import Peer, PeerState
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey, TransferEnded, TransferInfo
from tests.unit.transfer.kit import Net, Pair, Side, hello_of, meet, say

BACK = ("back", 1)


def both() -> tuple[Net, Side, Side]:
    """A pair with a session, in which decode also sends to prefill."""
    net, prefill, decode = meet()
    prefill.kv.sessions.dial(BACK)
    prefill.kv.handle(PrefillFound(BACK, ((decode.instance, decode.endpoint),)))
    net.pump()
    net.report_engines()
    net.pump()
    return net, prefill, decode


def peer(side: Side, instance: str, *, dialled: bool) -> Peer:
    found = side.kv.sessions.peer(instance, dialled=dialled)
    assert found is not None
    return found


def test_each_direction_has_a_session_of_its_own() -> None:
    _, prefill, decode = both()
    sessions = set()
    for side, instance in ((prefill, "decode-1"), (decode, "prefill-1")):
        for dialled in (True, False):
            found = peer(side, instance, dialled=dialled)
            assert found.state is PeerState.READY
            assert (found.receiver is not None) == dialled, "only the one that dials has a receiving engine"
            sessions.add(found.session)
    assert len(sessions) == 2


def test_a_hello_of_the_other_direction_ends_nothing() -> None:
    net, prefill, decode = both()
    pair = Pair(net, prefill, decode)
    hello = hello_of(net, decode)
    for dialled in (True, False):
        session = peer(prefill, "decode-1", dialled=dialled).session
        for answer in (True, False):
            say(
                net,
                "decode-1",
                prefill,
                msgspec.structs.replace(hello, session=session, answer=answer),
                session=session,
            )
    before = prefill.kv.counters["hellos_refused"]
    assert before >= 2
    for dialled in (True, False):
        assert peer(prefill, "decode-1", dialled=dialled).state is PeerState.READY
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is KVPoll.SUCCESS


def test_a_receiver_s_message_in_a_session_that_we_dialled_does_nothing() -> None:
    net, prefill, _ = both()
    session = peer(prefill, "decode-1", dialled=True).session
    key = MemoryKey(7, 1, "decode-1")
    info = TransferInfo(key=key, pages=((0, 1, 2),), aux_slot=0, prompt_digest="d", cached_tokens=0)
    say(net, "decode-1", prefill, info, session=session)
    assert prefill.kv.send_side.num_early == 0


def test_a_sender_s_message_in_the_other_session_does_nothing() -> None:
    net, prefill, decode = both()
    pair = Pair(net, prefill, decode)
    key = next(iter(decode.kv.receive_side.published)).key
    ended = TransferEnded(key=key, failure=Failure(code="forged", message=""), quiesced=True)
    say(net, "prefill-1", decode, ended, session=peer(decode, "prefill-1", dialled=False).session)
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    assert next(iter(decode.kv.receive_side.published)).key == key


def test_a_refused_connection_ends_both_sessions() -> None:
    net, prefill, _ = both()
    prefill.kv.handle(PeerGone("decode-1"))
    assert prefill.kv.sessions.peer("decode-1") is None
    net.pass_time(4)


def test_no_request_migrates_to_the_server_that_has_it() -> None:
    _, prefill, _ = both()
    with pytest.raises(RequestError, match="the server that has it"):
        prefill.kv.learn_sender(BACK, prefill.kv.address)
