"""Mutated control frames against a prefill and a decode manager: the real wire, sessions and both sides of transfers.

Called by `tests.fuzz.__main__` with many frames, by `test_fuzz` with few. Only sockets, engines and clock are made up.
A frame is a packet that was sent in earnest or made up to fit the types, then changed as a msgpack tree or byte by
byte, and sealed with the right token in most cases: what gets in is what somebody with the token may say.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import random
import time
import zlib
from collections import Counter
from typing import Any, get_args

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol.codec import PROTOCOL_VERSION, Seal
from pdserve.transfer.events import FrameArrived, PeerGone, PeerListens
from pdserve.transfer.wire import Body, Hello, Packet, Ping, Pong, RankMemory, Wire, WireRegion
from tests.fuzz.structs import change_bytes, change_tree, sample
from tests.fuzz.watch import rss_mb
from tests.unit.transfer.kit import ADDRESS, TOKEN, Net, Pair, Side, found, meet

EPISODE = 5000
"""Frames after which managers are made anew: what one episode leaves must not be there in the next."""
MAX_HANDLE_S = 2.0
"""A frame is handled within this, on a machine that others use, too; microseconds are usual."""
MAX_OBJECTS = 2_000_000
"""That managers may reach after an episode."""
MAX_OUTBOX = 200_000
"""Frames that managers may want to send in an episode: no frame may set off a storm."""
MAX_GROWTH_MB = 64.0
FRESH, POOL = 0.2, 200
"""How often a packet is made up rather than taken once more, and out of how many it is taken."""
MANY = 3000
"""Names of peers that there may be, more than managers remember."""
BODIES: tuple[type[msgspec.Struct], ...] = get_args(Body)


@dataclasses.dataclass
class FrameReport:
    """What a run has come to."""

    num_frames: int = 0
    num_refused: int = 0
    num_taken: int = 0
    slowest_s: float = 0.0
    most_objects: int = 0
    growth_mb: float = 0.0
    seconds: float = 0.0
    counters: Counter[str] = dataclasses.field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.num_frames} frames in {self.seconds:.0f} s ({self.num_frames / max(self.seconds, 1e-9):.0f}/s): "
            f"{self.num_taken} got in, {self.num_refused} refused; slowest {self.slowest_s * 1e3:.1f} ms, "
            f"at most {self.most_objects} objects, memory {self.growth_mb:+.1f} MB; "
            f"{dict(sorted(self.counters.items()))}"
        )


class Episode:
    """Two managers with a session and transfers under way, and what is said to them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.net, self.prefill, self.decode = meet()
        self._seal = Seal(TOKEN)
        self._wire = Wire(TOKEN)
        self._room = 100
        self.pairs = [Pair(self.net, self.prefill, self.decode, room=room) for room in (7, 8)]
        self.pairs[0].send()
        self.net.pump()
        self._facts = next(packet.body.facts for packet in self.net.seen if isinstance(packet.body, Hello))
        self.num_sent = 0
        self._heard: collections.deque[Packet] = collections.deque(maxlen=POOL)
        """The newest packets that the managers sent, to any receiver."""
        self._pools: dict[str, list[bytes]] = {"prefill-1": [], "decode-1": []}
        """Packets to change, by who is told; to make one up takes longer than to change it."""

    def packet(self, to: Side) -> Packet:
        """One that fits the types: heard before, or made up about rooms, peers and facts that there are."""
        rng, how = self._rng, self._rng.random()
        if self.net.seen and how < 0.3:
            return msgspec.structs.replace(rng.choice([*self.net.seen, *self._heard]), receiver=to.instance)
        challenges = [packet for packet in self._heard if isinstance(packet.body, Ping) and packet.body.nonce]
        if challenges and how < 0.5:
            return _proof(rng.choice(challenges), to, rng)
        some = range(12) if rng.random() < 0.5 else range(rng.randrange(MANY), MANY)
        known = ("prefill-1", "decode-1", *(f"peer-{i}" for i in some[:12]))
        sender = rng.choice(known)
        pins: dict[str, Any] = {
            "sender": sender,
            "receiver": to.instance,
            "session": zlib.crc32(sender.encode()) + (rng.random() < 0.2),
            "answer": rng.random() < 0.2,
            "origin": rng.choice(known),
            "endpoint": f"{sender if rng.random() < 0.7 else rng.choice(known)}:1",
            "room": rng.choice((7, 8, self._room, rng.randint(0, 50))),
            "attempt": rng.randint(0, 3),
        }
        if rng.random() < 0.7:
            pins["facts"] = self._facts
            pins |= {"tp_size": 1, "pp_size": 1, "dp_size": 1, "dp_attention": False}
            pins["kv_regions"] = (sample(WireRegion, rng),)
            pins["ranks"] = (sample(RankMemory, rng, pins),)
        pins["body"] = sample(Hello if rng.random() < 0.3 else rng.choice(BODIES), rng, pins)
        return sample(Packet, rng, pins)

    def frame(self, to: Side) -> bytes:
        """A sealed frame, changed in some way."""
        rng, how = self._rng, self._rng.random()
        pool = self._pools[to.instance]
        if rng.random() < FRESH or not pool:
            pool.append(msgspec.msgpack.encode(self.packet(to)))
        encoded = rng.choice(pool[-POOL:])
        if how < 0.25:
            return self._sealed(encoded)
        if how < 0.6:
            tree = change_tree(msgspec.msgpack.decode(encoded), rng, rng.choice((1, 1, 2, 4)))
            try:
                return self._sealed(msgspec.msgpack.encode(tree))
            except (OverflowError, RecursionError):
                return self._sealed(encoded)
        if how < 0.9:
            return self._sealed(change_bytes(encoded, rng))
        if how < 0.97:
            return change_bytes(self._sealed(encoded), rng)
        return Seal("another").close(bytes([PROTOCOL_VERSION]) + encoded)

    def _sealed(self, encoded: bytes) -> bytes:
        version = PROTOCOL_VERSION if self._rng.random() < 0.99 else self._rng.randrange(256)
        return self._seal.close(bytes([version]) + encoded)

    def happen(self) -> None:
        """What else goes on meanwhile: time, copies that end, probes that return, requests that come and go."""
        match self._rng.randrange(7):
            case 0:
                self.net.clock.advance(self._rng.choice((0.1, 1.0, 3.0, 70.0)))
                self.prefill.kv.tick()
                self.decode.kv.tick()
            case 1:
                self.prefill.end_jobs()
            case 2 if self.decode.directory.probes:
                instance, _ = self._rng.choice(self.decode.directory.probes)
                self.decode.kv.handle(PeerGone(instance) if self._rng.random() < 0.2 else PeerListens(instance))
            case 3:
                self._open()
            case 4:
                found(self.decode, self.prefill)
            case 5:
                self.prefill.kv.drain_state_changes(sending=True)
                self.decode.kv.drain_state_changes(sending=False)
            case _:
                self.prefill.kv.flush()
        self.drain()

    def _open(self) -> None:
        """A request on either server, without memory: it is looked at and closed."""
        self._room += 1
        try:
            self.prefill.kv.open_sender(self._room, ADDRESS[0], "d", num_tokens=12).close()
            self.decode.kv.open_receiver(self._room, ADDRESS, "d").close()
        except RequestError:
            pass

    def drain(self) -> None:
        """What the managers said goes nowhere, but is counted and remembered as what may be heard again."""
        self.net.report_engines()
        self.num_sent += len(self.net.frames)
        self._heard.extend(self._wire.decode(frame) for _, frame in self.net.frames[-POOL:])
        self.net.frames.clear()
        del self.net.seen[64:]
        del self.decode.directory.probes[64:]


def _proof(challenge: Packet, to: Side, rng: random.Random) -> Packet:
    """A challenge that is answered: by whom it was sent to or another one, in its session or another."""
    assert isinstance(challenge.body, Ping)
    return Packet(
        sender=challenge.receiver if rng.random() < 0.8 else f"peer-{rng.randrange(12)}",
        receiver=to.instance,
        session=challenge.session + (rng.random() < 0.2),
        seq=rng.randrange(1 << 20),
        acks=(),
        body=Pong(nonce=challenge.body.nonce),
    )


def run(num_frames: int, seed: int) -> FrameReport:
    """Play so many frames. Raises AssertionError, or what a manager raised, with the episode's seed in a note."""
    report, began, base = FrameReport(), time.monotonic(), 0.0
    for number in range(-(-num_frames // EPISODE)):
        rng = random.Random(f"{seed}-{number}")
        episode = Episode(rng)
        frame = b""
        try:
            for _ in range(min(EPISODE, num_frames - report.num_frames)):
                to = rng.choice((episode.prefill, episode.decode))
                frame = episode.frame(to)
                _deliver(to, frame, report)
                if rng.random() < 0.1:
                    episode.happen()
            episode.drain()
            _check_bounds(episode, report)
            _check_service(episode.net)
        except Exception as error:
            error.add_note(f"episode {number} of seed {seed}, frame {frame.hex()}")
            raise
        if number == 0:
            gc.collect()
            base = rss_mb()
    gc.collect()
    report.growth_mb = rss_mb() - base
    report.seconds = time.monotonic() - began
    assert report.growth_mb < MAX_GROWTH_MB, str(report)
    return report


def _deliver(to: Side, frame: bytes, report: FrameReport) -> None:
    before = to.kv.counters["control_frames_refused"]
    began = time.perf_counter()
    to.kv.handle(FrameArrived(frame))
    took = time.perf_counter() - began
    report.num_frames += 1
    refused = to.kv.counters["control_frames_refused"] - before
    report.num_refused += refused
    report.num_taken += 1 - refused
    report.slowest_s = max(report.slowest_s, took)
    assert took < MAX_HANDLE_S, f"{took:.1f} s for one frame"


def _check_bounds(episode: Episode, report: FrameReport) -> None:
    """What the managers keep is bounded."""
    for side in (episode.prefill, episode.decode):
        report.counters.update({name: count for name, count in side.kv.counters.items() if count})
        objects = reachable(side.kv)
        report.most_objects = max(report.most_objects, objects)
        assert objects < MAX_OBJECTS, f"{side.instance} keeps {objects} objects"
    assert episode.num_sent < MAX_OUTBOX, f"{episode.num_sent} frames sent in one episode"


def _check_service(net: Net) -> None:
    """Servers that have heard all that still serve a peer that comes anew: a transfer goes through."""
    prefill = net.sides["prefill-1:1"]
    net.frames.clear()
    late = Side(net, "decode-late")
    late.kv.sessions.dial(ADDRESS)
    found(late, prefill)
    net.pump()
    free = prefill.pages.num_free
    if free < 3 or not prefill.aux_slots.num_free:
        return
    pair = Pair(net, prefill, late, room=1 << 40)
    pair.send()
    prefill.end_jobs()
    net.pump()
    assert pair.receiver.poll().name == "SUCCESS", f"a new peer is not served: {pair.receiver.poll()}"


def reachable(root: Any) -> int:
    """Objects that `root` keeps, without classes, modules and functions."""
    seen = {id(root)}
    todo = [root]
    skipped = (type, type(gc), type(reachable))
    while todo:
        for found_object in gc.get_referents(todo.pop()):
            if id(found_object) not in seen and not isinstance(found_object, skipped):
                seen.add(id(found_object))
                todo.append(found_object)
    return len(seen)
