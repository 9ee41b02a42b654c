"""Encodes and decodes messages: msgpack, versioned, bounded in size. No message crosses a socket as pickle."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Generic, TypeVar

import msgspec

from pdserve.errors import ProtocolError

SEAL_BYTES = 16


class Seal:
    """Keyed BLAKE2b digest of `SEAL_BYTES` in front of each frame. An empty secret still detects corruption.

    Any thread may call it.
    """

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def close(self, frame: bytes) -> bytes:
        """Return `frame` with its seal in front."""
        return self._digest(frame) + frame

    def open(self, sealed: bytes, *, max_bytes: int) -> bytes:
        """Check the seal and return the frame behind it.

        Raises:
            ProtocolError: the frame is empty, is larger than `max_bytes` with its seal, or has another secret's seal.
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
"""Size limit of messages between ranks. A step result holds log probabilities of a whole prefill chunk."""


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
        """Encode `message` as one frame."""
        return bytes([PROTOCOL_VERSION]) + self._encoder.encode(message)

    def decode(self, frame: bytes) -> T:
        """Decode the message in `frame`."""
        if not frame or len(frame) > self._max_bytes:
            raise ProtocolError(f"frame of {len(frame)} bytes, expected 1 to {self._max_bytes}")
        if frame[0] != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {frame[0]}, expected {PROTOCOL_VERSION}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"frame does not decode: {error}") from error
