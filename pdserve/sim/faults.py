"""What may go wrong in a simulated world, and how often; cut links; frames that are damaged, replayed or made up.

`SimNet` asks for what happens to a message or a copy; `mishaps` begins what happens to servers and links.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Container, Sequence

import msgspec

from pdserve.errors import ProtocolError
from pdserve.transfer.wire import Ack, Hello, MemoryKey, Meta, Packet, Ping, Pong, Refusal, Wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities per message, copy, probe, look-up or step; `max_delay_s` bounds how late anything is."""

    lost: float = 0.0
    repeated: float = 0.2
    copy_failed: float = 0.0
    note_lost: float = 0.0
    lands_late: bool = False
    """Where the engine notifies: a copy that has ended well is seen some time later only, but before its note."""
    abort: float = 0.0
    """A client goes away, or an operator ends a half."""
    kill: float = 0.0
    max_delay_s: float = 2.0
    cut: float = 0.0
    """A link between two hosts is cut for a while, in one direction or both."""
    max_cut_s: float = 60.0
    probe_lies: float = 0.0
    """A probe of a living process is refused, or one of a dead process is answered."""
    usurper: float = 0.0
    """A second instance says Hello from the endpoint of a living one."""
    replayed: float = 0.0
    """A frame that was recorded earlier comes again, perhaps to the successor of its receiver."""
    stop: float = 0.0
    """A server does not run for a while (SIGSTOP); copies that have begun land meanwhile."""
    max_stop_s: float = 90.0
    clock_leap: float = 0.0
    """The clock of one machine jumps ahead."""
    clocks_differ: bool = False
    """Each machine counts from a moment of its own."""
    frame_damaged: float = 0.0
    """One bit of a frame is wrong."""
    odd_frame: float = 0.0
    """A well-sealed frame that no peer would send."""
    kv_damaged: float = 0.0
    """One bit of a copied page is wrong; only a checksum notices."""
    slow_directory: float = 0.0
    """A look-up takes long, or ends in nothing."""
    stale_directory: float = 0.0
    """A look-up gives what was true when it began."""
    max_look_up_s: float = 60.0
    switch: float = 0.0
    """A server drains, ends, and comes back in the other role, or in its own."""
    rank_death: float = 0.0
    """One rank of a replica dies alone, and the others notice some time later."""

    def healed(self) -> Faults:
        """What is left when what may fail a request is over."""
        return dataclasses.replace(
            self,
            lost=min(self.lost, 0.2),
            copy_failed=0.0,
            note_lost=0.0,
            abort=0.0,
            kill=0.0,
            cut=0.0,
            probe_lies=0.0,
            stop=0.0,
            kv_damaged=0.0,
            slow_directory=0.0,
            stale_directory=0.0,
            switch=0.0,
            rank_death=0.0,
        )


class CutLinks:
    """Links between hosts that are cut, each in one direction, until some time."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def cut(self, source: str, target: str, until: float) -> None:
        """Nothing goes from `source` to `target` before `until`."""
        self._until[source, target] = max(until, self._until.get((source, target), until))

    def is_cut(self, source: str, target: str, now: float) -> bool:
        """Whether what `source` sends to `target` is lost now."""
        return bool(self._until) and self._until.get((source, target), now) > now

    def heal(self) -> None:
        """All links are whole."""
        self._until.clear()


class Recorder:
    """The newest frames, and where they went; makes frames of them that nobody sent."""

    def __init__(self, rng: random.Random, size: int = 400) -> None:
        self._rng = rng
        self._frames: deque[tuple[str, bytes]] = deque(maxlen=size)
        self._hellos: deque[tuple[str, bytes]] = deque(maxlen=size // 10)
        """Those that have a Hello: few of all, but the most worth to an attacker."""
        self._wire = Wire("")
        self._num_strangers = 0

    def record(self, endpoint: str, frame: bytes) -> None:
        """`frame` was sent to `endpoint`."""
        if b"Hello" not in frame:
            self._frames.append((endpoint, frame))
        elif (endpoint, frame) not in self._hellos:  # else it is said again until it is acknowledged
            self._hellos.append((endpoint, frame))

    def replay(self, senders: Container[str] | None = None) -> tuple[str, bytes] | None:
        """One of them, as it was, where given of one of these `senders`; None where there is none."""
        frames = self._hellos if self._rng.random() < 0.3 else self._frames
        if not frames:
            return None
        endpoint, frame = self._rng.choice(frames)
        known = senders is None or self._wire.decode(frame).sender in senders
        return (endpoint, frame) if known else None

    def usurp(self) -> tuple[str, bytes] | None:
        """A Hello as it was said, endpoint and all, but by an instance that does not exist, or of another session."""
        found = self._decoded(self._hellos, lambda packet: isinstance(packet.body, Hello) and not packet.body.answer)
        if found is None:
            return None
        endpoint, packet = found
        body = packet.body
        assert isinstance(body, Hello)
        if self._rng.random() < 0.5:
            packet = msgspec.structs.replace(packet, sender=self._stranger())
        else:
            session = self._rng.getrandbits(60) + 1
            hello = msgspec.structs.replace(body, session=session)
            packet = msgspec.structs.replace(packet, session=session, body=hello)
        usurping = self._wire.encode(packet)
        self.record(endpoint, usurping)  # it may say so again
        return endpoint, usurping

    def odd(self, senders: Container[str] | None = None) -> tuple[str, bytes] | None:
        """A frame that is well sealed, and that no peer would send: it must change nothing. `senders`: see `replay`."""
        frames = self._hellos if self._rng.random() < 0.2 else self._frames
        found = self._decoded(frames, lambda packet: not isinstance(packet.body, Refusal))
        if found is None:
            return None
        endpoint, packet = found
        if senders is not None and packet.sender not in senders:
            return None
        return endpoint, self._wire.encode(self._rng.choice(self._oddities(packet))(packet))

    def _oddities(self, packet: Packet) -> list[Callable[[Packet], Packet]]:
        """Ways to make `packet` odd."""
        replace, key = msgspec.structs.replace, getattr(packet.body, "key", None)
        ways: list[Callable[[Packet], Packet]] = [
            lambda packet: replace(packet, receiver=self._stranger()),
            lambda packet: replace(packet, seq=0, body=Ack(), acks=tuple(range(1 << 40, (1 << 40) + 5))),
        ]
        if not isinstance(packet.body, Hello):
            ways.append(lambda packet: replace(packet, sender=self._stranger()))
        if isinstance(key, MemoryKey):
            others = [MemoryKey(key.room, key.attempt, "nobody-0")]
            if not isinstance(packet.body, Meta):  # a later attempt is what a receiver may say
                others += [
                    MemoryKey(key.room, key.attempt + 1000, key.origin),
                    MemoryKey(key.room + 1000, key.attempt, key.origin),
                ]
            seq = packet.seq and packet.seq + (
                1 << 41
            )  # with its own number it would stand for a message of the peer's
            ways += [
                lambda packet, key=other: replace(packet, seq=seq, body=replace(packet.body, key=key))  # type: ignore[misc]
                for other in others
            ]
        if isinstance(packet.body, Ping | Pong | Ack):
            ways.append(lambda packet: replace(packet, seq=1 << 41))
        return ways

    def _decoded(
        self, frames: Sequence[tuple[str, bytes]], fits: Callable[[Packet], bool]
    ) -> tuple[str, Packet] | None:
        """A recorded frame for which `fits` holds, decoded; None where a few tries find none."""
        for _ in range(8):
            if not frames:
                break
            endpoint, frame = self._rng.choice(frames)
            try:
                packet = self._wire.decode(frame)
            except ProtocolError:
                continue
            if fits(packet):
                return endpoint, packet
        return None

    def _stranger(self) -> str:
        self._num_strangers += 1
        return f"stranger-{self._num_strangers}"


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` with one bit wrong."""
    bit = rng.randrange(len(content) * 8)
    out = bytearray(content)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
