"""The stamp of a state slot: the request and the position that the state belongs to.

A step writes the stamps of its rows before their states. They lie in the STAMP group, whose pages are the slots of the
STATE groups: every copy of a slot moves its stamp from the same list of slots. So a stamp is wrong wherever a copy took
another slot, another moment, or no slot at all. A number beside the copy, such as one in the aux record, would be right
in these cases: it says what the sender meant to send.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORDS = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, slots=True)
class SlotStamp:
    """`request` is a digest of the prompt, 64 bits. `position`: tokens that the state covers."""

    request: int
    position: int

    @classmethod
    def of(cls, prompt: Sequence[int], position: int) -> SlotStamp:
        """Return the stamp of the state of `prompt`'s request after `position` tokens."""
        packed = np.asarray(prompt, dtype=np.int64).tobytes()
        return cls(int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little"), position)

    @property
    def words(self) -> tuple[int, int]:
        """The content of the plane `stamp`: two numbers of 64 bits."""
        return self.request, self.position

    def to_bytes(self) -> bytes:
        """Return the content of the plane as bytes."""
        return np.array(self.words, dtype=_WORDS).tobytes()

    def fills(self, slot: bytes | npt.NDArray[np.uint8]) -> bool:
        """Return whether `slot`, the bytes of all layers of a slot of the STAMP group, has this stamp in each.

        True on a rank without such layers.
        """
        if not len(slot):
            return True
        layers = np.frombuffer(slot, dtype=_WORDS).reshape(-1, 2)
        return bool((layers == np.array(self.words, dtype=_WORDS)).all())
