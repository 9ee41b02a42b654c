"""Bytes to messages and back: msgpack, versioned, bounded. Nothing crosses a socket as pickle."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Generic, TypeVar

import msgspec

from pdserve.errors import ProtocolError

SEAL_BYTES = 16


class Seal:
    """A keyed digest in front of each frame. An empty secret still catches damage. Any thread."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def close(self, frame: bytes) -> bytes:
        """`frame` with its seal in front."""
        return self._digest(frame) + frame

    def open(self, sealed: bytes, *, max_bytes: int) -> bytes:
        """The frame behind the seal.

        Raises:
            ProtocolError: there is none, it is larger than `max_bytes` with its seal, or not sealed with our secret.
        """
        if not SEAL_BYTES < len(sealed) <= max_bytes:
            raise ProtocolError(f"control frame of {len(sealed)} bytes")
        frame = sealed[SEAL_BYTES:]
        if not hmac.compare_digest(self._digest(frame), sealed[:SEAL_BYTES]):
            raise ProtocolError("control frame is not sealed with our token")
        return frame

    def _digest(self, frame: bytes) -> bytes:
        return hashlib.blake2b(frame, key=self._key, digest_size=SEAL_BYTES).digest()


T = TypeVar("T")

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
MAX_RANK_BYTES = 512 << 20
"""Between the ranks of a server. What a step gave may be large: log probabilities of a chunk for many tokens each."""


class Codec(Generic[T]):
    """Encodes and decodes one union of tagged structs, with a version byte in front.

    Raises:
        ProtocolError: on decode, for another version, an oversized frame, or bytes that do not fit the types.
    """

    def __init__(self, union: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def encode(self, message: T) -> bytes:
        """One frame."""
        return bytes([PROTOCOL_VERSION]) + self._encoder.encode(message)

    def decode(self, frame: bytes) -> T:
        """The message in `frame`."""
        if not frame or len(frame) > self._max_bytes:
            raise ProtocolError(f"frame of {len(frame)} bytes, expected 1 to {self._max_bytes}")
        if frame[0] != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {frame[0]}, expected {PROTOCOL_VERSION}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"frame does not decode: {error}") from error
