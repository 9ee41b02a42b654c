"""The control plane's door: what is sealed and well-formed comes in, everything else is a ProtocolError."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.protocol.codec import PROTOCOL_VERSION, Codec
from pdserve.protocol.failure import Failure
from pdserve.transfer.wire import (
    MAX_FRAME_BYTES,
    Abort,
    Ack,
    Body,
    Hello,
    MemoryKey,
    Packet,
    Ping,
    Pong,
    RankMemory,
    Refusal,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
    Wire,
    WireRegion,
    prompt_digest,
)

WIRE = Wire("secret")
KEY = MemoryKey(7, 3, "decode-1")
FAILURE = Failure(code="x", message="y")
HELLO = Hello(
    endpoint="h:1",
    facts={"page_size": 16, "model": "m"},
    ranks=(RankMemory("t", (WireRegion(1, 2),)),),
    aux_region=WireRegion(3, 4),
    aux_slot_bytes=64,
    answer=False,
)
BODIES: list[Body] = [
    HELLO,
    Refusal(field="page_size", message="differs"),
    TransferInfo(key=KEY, cached_tokens=0, pages=((1, 2, 3),), aux_slot=5, prompt_digest="d"),
    TransferDone(key=KEY, stats=TransferStats(num_bytes=9, write_s=0.5)),
    TransferEnded(key=KEY, failure=FAILURE, quiesced=True),
    Abort(key=KEY, failure=FAILURE, prompt_digest="d"),
    Ping(),
    Pong(),
    Ack(),
]


def _packet(body: Body) -> Packet:
    return Packet(sender="a", receiver="b", seq=1, body=body)


def _seal(frame: bytes, token: str = "secret") -> bytes:
    """Sealed by someone who knows the token, whatever the frame holds."""
    key = hashlib.blake2b(token.encode(), digest_size=32).digest()
    return hashlib.blake2b(frame, key=key, digest_size=16).digest() + frame


def _frame(**changes: object) -> bytes:
    """A sealed TransferInfo with other values than the types allow."""
    body: dict[str, object] = {
        "type": "Meta",
        "key": {"room": 1, "attempt": 1, "origin": "d"},
        "pages": [[0]],
        "aux_slot": 0,
        "prompt_digest": "d",
        "cached_tokens": 0,
    }
    packet = {"sender": "a", "receiver": "b", "seq": 1, "body": body | changes}
    return _seal(bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(packet))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_comes_back_as_it_was_sent(body: Body) -> None:
    assert WIRE.decode(WIRE.encode(_packet(body))) == _packet(body)


def test_another_token_is_refused() -> None:
    for token in ("", "Secret", "secret "):
        with pytest.raises(ProtocolError, match="not sealed"):
            WIRE.decode(Wire(token).encode(_packet(Ping())))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_one_changed_bit_is_noticed(data: st.DataObject) -> None:
    frame = bytearray(WIRE.encode(_packet(HELLO)))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        WIRE.decode(bytes(frame))


def test_frames_beyond_the_limit_are_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="control frame of"):
        WIRE.decode(b"x" * (MAX_FRAME_BYTES + 1))
    for size in (0, 1, 16):
        with pytest.raises(ProtocolError):
            WIRE.decode(b"x" * size)


@given(junk=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_junk_is_refused_sealed_or_not(junk: bytes) -> None:
    for frame in (junk, _seal(junk), _seal(bytes([PROTOCOL_VERSION]) + junk)):
        with pytest.raises(ProtocolError):
            WIRE.decode(frame)


@given(data=st.data(), body=st.sampled_from(BODIES))
@settings(max_examples=300, deadline=None)
def test_damaged_messages_with_a_right_seal_decode_or_are_refused(data: st.DataObject, body: Body) -> None:
    frame = bytearray(WIRE.encode(_packet(body))[16:])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = WIRE.decode(_seal(bytes(frame)))
    except ProtocolError:
        return
    assert isinstance(decoded, Packet)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_seal(bytes([PROTOCOL_VERSION + 1]) + msgspec.msgpack.encode(_packet(Ping()))), id="version"),
        pytest.param(_seal(WIRE.encode(_packet(Ping()))[16:].replace(b"sender\xa1a", b"sender\xa1\xff")), id="utf-8"),
        pytest.param(_seal(bytes([PROTOCOL_VERSION]) + b"\x81\xa1x" + b"\x91" * 100_000), id="nesting"),
        pytest.param(_frame(aux_slot=-1), id="negative slot"),
        pytest.param(_frame(aux_slot=2**63), id="slot beyond 63 bits"),
        pytest.param(_frame(pages=[[-1]]), id="negative page"),
        pytest.param(_frame(pages=[[2**64 - 1]]), id="page beyond 63 bits"),
        pytest.param(_frame(pages=[[1.5]]), id="half a page"),
        pytest.param(_frame(key={"room": -1, "attempt": 1, "origin": "d"}), id="negative room"),
        pytest.param(_frame(key={"room": 1, "attempt": -1, "origin": "d"}), id="negative attempt"),
        pytest.param(_frame(prompt_digest="x" * 10_000), id="long digest"),
        pytest.param(_frame(type="Nothing"), id="unknown message"),
    ],
)
def test_sealed_frames_that_no_peer_of_ours_sends_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        WIRE.decode(frame)


def test_the_frames_of_this_test_are_wrong_for_the_reason_given_only() -> None:
    assert isinstance(WIRE.decode(_frame()).body, TransferInfo)


def test_a_codec_refuses_bad_text_and_deep_nesting_as_a_protocol_error() -> None:
    codec: Codec[Refusal] = Codec(Refusal)
    frame = codec.encode(Refusal(field="aa", message="m"))
    assert codec.decode(frame).field == "aa"
    with pytest.raises(ProtocolError):
        codec.decode(frame.replace(b"aa", b"\xff\xff"))


def test_digests_tell_prompts_apart() -> None:
    assert prompt_digest([1, 2, 3]) == prompt_digest([1, 2, 3])
    assert len({prompt_digest(p) for p in ([1, 2, 3], [1, 2], [3, 2, 1], [258, 3], [])}) == 5


def test_a_status_that_is_no_http_error_is_refused() -> None:
    key = MemoryKey(1, 1, "decode")
    lie = TransferEnded(key=key, failure=Failure(code="x", message="y", status=7), quiesced=True)
    frame = Wire("token").encode(Packet(sender="a", receiver="b", seq=1, body=lie))
    with pytest.raises(ProtocolError):
        Wire("token").decode(frame)


def test_the_digest_of_a_prompt_is_the_one_of_its_ids_in_four_bytes_each() -> None:
    assert prompt_digest([]) == hashlib.blake2b(b"", digest_size=8).hexdigest()
    assert prompt_digest([1, 70_000]) == hashlib.blake2b(bytes([1, 0, 0, 0, 112, 17, 1, 0]), digest_size=8).hexdigest()
