"""Seals frames with a shared secret: a process without it cannot make one, and damage is seen.

Used by what crosses TCP between servers (`transfer.wire`) and between the ranks of one (`ranks.links`).
"""

from __future__ import annotations

import hashlib
import hmac

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
