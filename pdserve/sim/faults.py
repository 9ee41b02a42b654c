"""Fault probabilities of a simulated world, cut links, and frames that are damaged, replayed or forged.

`SimNet` draws the faults of messages and copies; `mishaps` starts the faults of servers and links.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Container, Sequence

import msgspec

from pdserve.errors import ProtocolError
from pdserve.transfer.wire import Ack, Hello, MemoryKey, Packet, Ping, Pong, Refusal, TransferInfo, Wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Fault probabilities per message, copy, probe, look-up or step. `max_delay_s` bounds any delay, in seconds."""

    lost: float = 0.0
    repeated: float = 0.2
    copy_failed: float = 0.0
    note_lost: float = 0.0
    lands_late: bool = False
    """With a notifying engine: the bytes of a successful copy land later, but before its notification."""
    abort: float = 0.0
    """A client disconnects, or an operator aborts a request at one server."""
    kill: float = 0.0
    max_delay_s: float = 2.0
    cut: float = 0.0
    """A link between two hosts is cut for a while, in one direction or both."""
    max_cut_s: float = 60.0
    probe_lies: float = 0.0
    """A probe of a live process is refused, or a probe of a dead process is answered."""
    usurper: float = 0.0
    """A second instance sends Hello with the endpoint of a live one."""
    replayed: float = 0.0
    """A recorded frame is delivered again, perhaps to the successor of its receiver."""
    stop: float = 0.0
    """A server is stopped for a while (SIGSTOP); copies already begun continue meanwhile."""
    max_stop_s: float = 90.0
    clock_leap: float = 0.0
    """The clock of one machine jumps ahead."""
    clocks_differ: bool = False
    """Each machine's clock has its own origin."""
    frame_damaged: float = 0.0
    """One bit of a frame is flipped."""
    odd_frame: float = 0.0
    """A frame with a valid seal that no peer would send."""
    kv_damaged: float = 0.0
    """One bit of a copied page is flipped; only a checksum detects it."""
    slow_tier: float = 0.0
    """A copy between pages and the host tier takes long."""
    slow_directory: float = 0.0
    """A look-up takes long, or is never answered successfully."""
    stale_directory: float = 0.0
    """A look-up returns the state at its begin."""
    max_look_up_s: float = 60.0
    switch: float = 0.0
    """A server drains, ends, and restarts in the other role or its own."""
    change: float = 0.0
    """A server drains and takes the other role in place."""
    change_failed: float = 0.0
    """A rank cannot open the parts of the other role."""
    release: float = 0.0
    """A server drains, and gives its KV memory back to the system for a while."""
    rank_death: float = 0.0
    """One rank of a replica dies alone; the other ranks notice some time later."""

    update: float = 0.0
    """The weights of all servers change, one server after the other; no fault, and nothing may fail by it."""
    update_failed: float = 0.0
    """A rank cannot load the other weights."""
    migrate: float = 0.0
    """A running request moves to another decode server; no fault, and nothing may fail by it."""
    drain_migrate: float = 0.0
    """A running request of a draining decode server moves; per step and request. No fault either."""
    stage_death: float = 0.0
    """The source or the target of a migration dies while a stage is on its way."""
    slow_store: float = 0.0
    """A call of the store takes longer than any deadline."""
    store_away: float = 0.0
    """A call of the store fails."""
    store_lies: float = 0.0
    """A look-up names objects that are not there."""
    put_lost: float = 0.0
    """The store takes an object, and does not have it."""
    object_damaged: float = 0.0
    """An object is damaged, cut short, or that of another key."""

    def healed(self) -> Faults:
        """Return the faults that remain once no fault may fail a request."""
        return dataclasses.replace(
            self,
            lost=min(self.lost, 0.2),
            copy_failed=0.0,
            note_lost=0.0,
            abort=0.0,
            kill=0.0,
            stage_death=0.0,
            cut=0.0,
            probe_lies=0.0,
            stop=0.0,
            kv_damaged=0.0,
            slow_directory=0.0,
            stale_directory=0.0,
            switch=0.0,
            change=0.0,
            change_failed=0.0,
            release=0.0,
            rank_death=0.0,
        )


class CutLinks:
    """Links between hosts that are cut, each in one direction, until a given time."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def cut(self, source: str, target: str, until: float) -> None:
        """Drop all traffic from `source` to `target` before time `until`."""
        self._until[source, target] = max(until, self._until.get((source, target), until))

    def is_cut(self, source: str, target: str, now: float) -> bool:
        """Whether traffic from `source` to `target` is lost now."""
        return bool(self._until) and self._until.get((source, target), now) > now

    def heal(self) -> None:
        """Restore all links."""
        self._until.clear()


class Recorder:
    """Records the newest frames with their destinations, and forges frames from them."""

    def __init__(self, rng: random.Random, size: int = 400) -> None:
        self._rng = rng
        self._frames: deque[tuple[str, bytes]] = deque(maxlen=size)
        self._hellos: deque[tuple[str, bytes]] = deque(maxlen=size // 10)
        """Frames with a Hello: few of all frames, but the most useful to an attacker."""
        self._wire = Wire("")
        self._num_strangers = 0

    def record(self, endpoint: str, frame: bytes) -> None:
        """Record that `frame` was sent to `endpoint`."""
        if b"Hello" not in frame:
            self._frames.append((endpoint, frame))
        elif (endpoint, frame) not in self._hellos:  # a Hello is repeated until it is acknowledged
            self._hellos.append((endpoint, frame))

    def replay(self, senders: Container[str] | None = None) -> tuple[str, bytes] | None:
        """Return a recorded frame unchanged, or None. With `senders`, the frame's sender must be among them."""
        frames = self._hellos if self._rng.random() < 0.3 else self._frames
        if not frames:
            return None
        endpoint, frame = self._rng.choice(frames)
        known = senders is None or self._wire.decode(frame).sender in senders
        return (endpoint, frame) if known else None

    def usurp(self) -> tuple[str, bytes] | None:
        """Return a recorded Hello from a new, nonexistent instance or with another session; None without Hellos."""
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
        self.record(endpoint, usurping)  # so that it may be replayed
        return endpoint, usurping

    def odd(self, senders: Container[str] | None = None) -> tuple[str, bytes] | None:
        """Return a frame with a valid seal that no peer would send, or None. It must have no effect.

        `senders`: see `replay`.
        """
        frames = self._hellos if self._rng.random() < 0.2 else self._frames
        found = self._decoded(frames, lambda packet: not isinstance(packet.body, Refusal))
        if found is None:
            return None
        endpoint, packet = found
        if senders is not None and packet.sender not in senders:
            return None
        return endpoint, self._wire.encode(self._rng.choice(self._oddities(packet))(packet))

    def _oddities(self, packet: Packet) -> list[Callable[[Packet], Packet]]:
        """Return functions that make `packet` odd."""
        replace, key = msgspec.structs.replace, getattr(packet.body, "key", None)
        ways: list[Callable[[Packet], Packet]] = [
            lambda packet: replace(packet, receiver=self._stranger()),
            lambda packet: replace(packet, seq=0, body=Ack(), acks=tuple(range(1 << 40, (1 << 40) + 5))),
        ]
        if not isinstance(packet.body, Hello):
            ways.append(lambda packet: replace(packet, sender=self._stranger()))
        if isinstance(key, MemoryKey):
            others = [MemoryKey(key.room, key.attempt, "unknown-0")]
            if not isinstance(packet.body, TransferInfo):  # a receiver may send one with a later attempt
                others += [
                    MemoryKey(key.room, key.attempt + 1000, key.origin),
                    MemoryKey(key.room + 1000, key.attempt, key.origin),
                ]
            seq = packet.seq and packet.seq + (
                1 << 41
            )  # with its original number it would stand for a message of the real peer
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
        """Return a decoded recorded frame for which `fits` holds; None when a few attempts find none."""
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
    """Return `content` with one bit flipped."""
    bit = rng.randrange(len(content) * 8)
    out = bytearray(content)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
