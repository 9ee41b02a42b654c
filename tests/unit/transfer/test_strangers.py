"""What a process with the control token, or any where none is set, can do to the sessions of others."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.events import FrameArrived, PeerGone, PrefillFound
from pdserve.transfer.peers import MAX_ENDPOINTS, PeerState
from pdserve.transfer.room import KVPoll
from pdserve.transfer.sessions import MAX_ADDRESSES, MAX_PEERS
from pdserve.transfer.wire import (
    Abort,
    Body,
    Hello,
    MemoryKey,
    Packet,
    Ping,
    Pong,
    PromptLogprobsPart,
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
    BOOTSTRAP_S,
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

EVIL = "evil:1"
THIEF = "thief-1"
FORGED = Failure(code="forged", message="")
MESSAGES: dict[str, Callable[[TransferInfo, MemoryKey], Body]] = {
    "TransferInfo": lambda info, key: msgspec.structs.replace(info, key=key),
    "TransferInfo of another prompt": lambda info, key: msgspec.structs.replace(info, key=key, prompt_digest="e"),
    "Abort": lambda info, key: Abort(key=key, failure=FORGED, prompt_digest=info.prompt_digest),
    "PromptLogprobsPart": lambda info, key: PromptLogprobsPart(
        key=key, index=0, part=PromptLogprobs(start=0, own=b"", ranks=b"")
    ),
    "TransferDone": lambda info, key: TransferDone(key=key, stats=TransferStats()),
    "TransferEnded": lambda info, key: TransferEnded(key=key, failure=FORGED, quiesced=True),
    "TransferEnded, redirected": lambda info, key: TransferEnded(key=key, failure=FORGED, quiesced=True, moved_to=0),
    "Refusal": lambda info, key: Refusal(field="model", message=""),
    "Reset": lambda info, key: Reset(endpoint=THIEF, quiesced=True, answer=True),
}
"""All messages that name a key with its pages or end a session, as a peer sends them that knows those of another."""


def _frame(to: Side, sender: str, body: Body, session: int) -> None:
    """One frame without what follows from it on the network."""
    packet = Packet(sender=sender, receiver=to.instance, session=session, seq=1 << 40, body=body)
    to.kv.handle(FrameArrived(Wire(TOKEN).encode(packet)))


def _challenged(net: Net, prefill: Side, hello: Hello) -> int:
    """The nonce of a challenge of `x`, at an endpoint where `y` has a session already."""
    say(net, "y", prefill, msgspec.structs.replace(hello, endpoint=EVIL, session=77), session=77)
    before = len(net.seen)
    say(net, "x", prefill, msgspec.structs.replace(hello, endpoint=EVIL, session=78), session=78)
    (nonce,) = [p.body.nonce for p in net.seen[before:] if isinstance(p.body, Ping) and p.receiver == "x"]
    return nonce


def test_a_proof_is_good_for_one_endpoint_and_one_session() -> None:
    net, prefill, decode = meet()
    hello = hello_of(net, decode)
    nonce = _challenged(net, prefill, hello)
    for session in (0, 78, 79):
        say(net, "x", prefill, Pong(nonce=nonce), session=session)
    say(net, "x", prefill, msgspec.structs.replace(hello, session=78), session=78)
    say(net, "x", prefill, msgspec.structs.replace(hello, session=79), session=79)
    assert state_of(prefill, "decode-1") is PeerState.READY
    say(net, "x", prefill, msgspec.structs.replace(hello, endpoint=EVIL, session=78), session=78)
    assert state_of(prefill, "y") is PeerState.READY, "it was challenged anew"


def test_a_proof_is_not_good_for_a_session_before_the_one_that_has_begun() -> None:
    """A Hello is proved, and its process gives it up. A copy of it arrives when a newer session has begun."""
    net, prefill, decode = meet()
    hello = msgspec.structs.replace(hello_of(net, decode), endpoint=EVIL)
    say(net, "x", prefill, Pong(nonce=_challenged(net, prefill, hello)), session=78)
    net.pass_time(60)
    assert state_of(prefill, "y") is None
    say(net, "x", prefill, msgspec.structs.replace(hello, session=80), session=80)
    say(net, "x", prefill, msgspec.structs.replace(hello, session=78), session=78)
    peer = prefill.kv.sessions.peer("x")
    assert peer is not None and peer.session == 80


def test_more_challenges_than_are_remembered_end_nothing() -> None:
    net, prefill, decode = meet()
    hello = hello_of(net, decode)
    _frame(prefill, "x", Pong(nonce=_challenged(net, prefill, hello)), 78)
    for number in range(1100):
        _frame(prefill, f"z{number}", msgspec.structs.replace(hello, endpoint=EVIL, session=number + 100), number + 100)
    _frame(prefill, "x", msgspec.structs.replace(hello, endpoint=EVIL, session=78), 78)
    assert state_of(prefill, "decode-1") is PeerState.READY


def test_a_hello_in_another_s_name_neither_ends_its_session_nor_keeps_it_out() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    hello = msgspec.structs.replace(hello_of(net, decode), session=79)
    say(net, "decode-1", prefill, hello, session=79)
    say(net, "decode-1", prefill, msgspec.structs.replace(hello, endpoint=EVIL), session=79)
    net.pass_time(20)
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT
    assert state_of(prefill, "decode-1") is state_of(decode, "prefill-1") is PeerState.READY


def test_a_process_that_took_a_name_elsewhere_keeps_its_owner_out_no_longer_than_it_is_there() -> None:
    net, _, decode = meet()
    hello = hello_of(net, decode)
    other = Side(net, "prefill-2")
    taken = msgspec.structs.replace(hello, endpoint=EVIL, session=79)
    say(net, "decode-1", other, taken, session=79)
    assert state_of(other, "decode-1") is PeerState.READY
    net.pass_time(60)
    assert state_of(other, "decode-1") is None
    decode.kv.open_receiver(9, ("other", 1), "d")
    found(decode, other, ("other", 1))
    net.pass_time(4)
    assert state_of(other, "decode-1") is PeerState.READY


def test_a_hello_in_the_name_of_a_process_without_a_session_does_not_keep_it_out() -> None:
    net, _, decode = meet()
    hello = hello_of(net, decode)
    other = Side(net, "prefill-2")
    say(net, "decode-1", other, msgspec.structs.replace(hello, session=(1 << 62) + 1), session=(1 << 62) + 1)
    net.pump()
    decode.kv.open_receiver(9, ("other", 1), "d")
    found(decode, other, ("other", 1))
    net.pass_time(4)
    peer = other.kv.sessions.peer("decode-1")
    assert peer is not None and peer.state is PeerState.READY and peer.session != (1 << 62) + 1


def test_decode_gives_pages_to_no_process_that_dials_it() -> None:
    net, prefill, decode = meet()
    hello = msgspec.structs.replace(hello_of(net, decode), endpoint=EVIL, session=79)
    say(net, "prefill-1", decode, hello, session=79)
    peer = decode.kv.sessions.peer("prefill-1")
    assert peer is not None and peer.endpoint == prefill.endpoint

    decode = Side(net, "decode-2")
    say(net, "prefill-1", decode, hello, session=79)
    receiver = decode.kv.open_receiver(9, ADDRESS, "d")
    found(decode, prefill)
    net.pass_time(4)
    peer = decode.kv.sessions.peer("prefill-1")
    assert peer is not None and peer.endpoint == prefill.endpoint and peer.receiver is not None
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_later_session_cannot_say_that_an_earlier_one_writes_no_more() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    key = next(iter(decode.kv.receive_side.published)).key
    pair.send()
    decode.engine.fences = False
    net.drop = lambda packet: True
    decode.kv.handle(PeerGone("prefill-1"))
    net.report_engines()
    decode.kv.sessions.dial(ADDRESS)
    decode.kv.handle(PrefillFound(ADDRESS, (("prefill-1", EVIL),)))
    net.report_engines()
    later = decode.kv.sessions.peer("prefill-1")
    assert later is not None
    answer = msgspec.structs.replace(hello_of(net, prefill), endpoint=EVIL, session=later.session)
    _frame(decode, "prefill-1", answer, later.session)
    assert later.state is PeerState.READY
    pair.receiver.close()
    for lease in pair.theirs:
        lease.drop("request")
    before = decode.free
    failure = Failure(code="forged", message="")
    _frame(decode, "prefill-1", TransferEnded(key=key, failure=failure, quiesced=True), later.session)
    assert decode.free == before == (13, 3)


def test_a_flood_of_endpoints_opens_a_few() -> None:
    net, prefill, _ = meet()
    for number in range(3000):
        _frame(prefill, "s", Ping(endpoint=f"10.0.{number // 250}.{number % 250}:99"), 5)
    opened = {endpoint for endpoint, _ in net.frames}
    assert 0 < len(opened) <= MAX_ENDPOINTS
    net.frames.clear()
    net.pass_time(60)
    assert opened <= set(prefill.socket.forgotten)


def test_a_flood_of_hellos_leaves_old_peers_alone_and_ends() -> None:
    net, prefill, decode = meet()
    hello = hello_of(net, decode)
    for number in range(MAX_PEERS + 100):
        _frame(prefill, f"z{number}", msgspec.structs.replace(hello, endpoint=f"z{number}:9", session=number + 100), 0)
    assert len(list(prefill.kv.sessions)) == MAX_PEERS
    assert prefill.kv.counters["hellos_refused"] >= 100
    assert state_of(prefill, "decode-1") is PeerState.READY
    net.frames.clear()
    for _ in range(30):
        net.pass_time(2)
        net.frames.clear()
    assert len(list(prefill.kv.sessions)) <= 1


def test_many_names_of_one_server_are_not_remembered() -> None:
    net, prefill, decode = meet()
    for number in range(2000):
        address = (f"p{number}", 8998)
        decode.kv.sessions.dial(address)
        found(decode, prefill, address)
    net.pump()
    peer = decode.kv.sessions.peer("prefill-1")
    assert peer is not None and len(peer.addresses) == MAX_ADDRESSES
    asked = len(decode.directory.finds)
    for number in reversed(range(2000)):
        decode.kv.sessions.dial((f"p{number}", 8998))
    assert len(decode.directory.finds) - asked >= 2000 - MAX_ADDRESSES, "they are looked up again"


def test_a_name_that_leads_elsewhere_ends_no_session_with_a_peer_that_lives() -> None:
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode)
    other = Side(net, "prefill-2")
    relay = ("relay", 1)
    decode.kv.sessions.dial(relay)
    found(decode, prefill, relay)
    found(decode, other, relay)
    net.pass_time(4)
    assert state_of(decode, "prefill-1") is PeerState.READY
    assert pair.receiver.poll() is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize("message", MESSAGES)
def test_a_peer_with_the_token_and_another_s_page_numbers_changes_nothing(message: str) -> None:
    """It has sessions with both servers. It says the message of another's keys, and of its own in that room."""
    net, prefill, decode = meet()
    pair = Pair(net, prefill, decode, takes_logprobs=True)
    for session, side in enumerate((prefill, decode), start=77):
        hello = msgspec.structs.replace(hello_of(net, decode), endpoint=f"{THIEF}:1", session=session)
        say(net, THIEF, side, hello)
        assert state_of(side, THIEF) is PeerState.READY
    (info,) = [packet.body for packet in net.seen if isinstance(packet.body, TransferInfo)]

    def held() -> list[object]:
        own = ("control_unacked", "keys_early")  # what the thief is answered, and what it offers itself
        counts = [{name: n for name, n in side.kv.counts().items() if name not in own} for side in (prefill, decode)]
        return [counts, prefill.free, decode.free, pair.sender.poll(), pair.receiver.poll(), pair.sender.key]

    before = held()
    for key in (info.key, msgspec.structs.replace(info.key, attempt=99), MemoryKey(info.key.room, 5, THIEF)):
        for side in (prefill, decode):
            say(net, THIEF, side, MESSAGES[message](info, key))
            assert held() == before, (key, side.instance)
    pair.send()
    assert {job.transport_address for job in prefill.engine.jobs} == {"decode-1"}
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll() is pair.sender.poll() is KVPoll.SUCCESS
    assert pair.receiver.take_logprobs() == []
    pair.drop_requests()
    net.pass_time(2 * BOOTSTRAP_S)
    assert_quiet_and_free(prefill, decode)


@pytest.mark.parametrize("digest", ["d", "e"])
def test_a_room_is_its_first_receiver_s_with_the_right_prompt(digest: str) -> None:
    """A peer that knows a room before its receiver has published takes it only if it knows the prompt as well."""
    net, prefill, decode = meet()
    say(net, THIEF, prefill, msgspec.structs.replace(hello_of(net, decode), endpoint=f"{THIEF}:1", session=77))
    stolen = TransferInfo(
        key=MemoryKey(7, 5, THIEF), pages=((0, 1, 2),), aux_slot=0, prompt_digest=digest, cached_tokens=0
    )
    say(net, THIEF, prefill, stolen)
    pair = Pair(net, prefill, decode)
    assert pair.sender.key == (stolen.key if digest == "d" else pair.receiver.key)
    (ended,) = {packet.body for packet in net.seen if isinstance(packet.body, TransferEnded)}
    assert isinstance(ended, TransferEnded)
    assert (ended.key, ended.failure.code) == (
        (pair.receiver.key, "room_in_use") if digest == "d" else (stolen.key, "prompt_mismatch")
    )
