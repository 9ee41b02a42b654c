"""Plays some worlds and prints a hash of all that their leaders have said to their shadows."""

from __future__ import annotations

import zlib

from pdserve.executor.input_batch import Seeds
from pdserve.ranks import messages
from pdserve.ranks.messages import Tick, ToFollower
from pdserve.scheduler import input_source as shared_mail
from tests.world import shadow
from tests.world.test_shadow import FAULTS, play

total = 0


class Summing:
    """The codec of the log, which adds up what it encodes."""

    def __init__(self) -> None:
        self._codec = messages.follower_codec()

    def encode(self, message: ToFollower) -> bytes:
        global total
        encoded = self._codec.encode(message)
        if isinstance(message, Tick):  # frames have addresses of memory, which each process has its own of
            names = [type(event).__name__ for event in message.events]
            total = zlib.crc32(repr((message.now, names, message.reduction, message.num_pending)).encode(), total)
        else:
            total = zlib.crc32(encoded, total)
        return encoded

    def decode(self, frame: bytes) -> ToFollower:
        return self._codec.decode(frame)


if __name__ == "__main__":
    shared_mail.Seeds = lambda: Seeds(0)  # type: ignore[assignment,misc]
    shadow.follower_codec = Summing  # type: ignore[assignment]
    for name in ("aborts", "kills", "late"):
        for seed in range(2):
            play(seed, FAULTS[name])
    print(total)
