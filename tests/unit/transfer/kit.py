"""Two or more `KVManager`s joined by lists instead of sockets, on a manual clock: a test says what happens when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdserve.base.clock import ManualClock
from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.memory.lease import Lease, LeasePool, PageAllocator
from pdserve.protocol.failure import Failure
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.events import (
    Address,
    CopyDone,
    CopyJob,
    FrameArrived,
    PeerFenced,
    PrefillFound,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.manager import KVArgs, KVManager, KVReceiver, KVSender, TransferTimes
from pdserve.transfer.peers import PeerState, SessionTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.wire import Body, Hello, MemoryKey, Packet, RankMemory, TransferStats, Wire

ADDRESS: Address = ("prefill", 8998)
TOKEN = "cluster"
BROKEN = Failure(code="engine_failed", message="the engine says -1")
CLIENT_LEFT = Failure(code="aborted", message="the client left", origin="client", status=499)
FACTS: dict[str, str | int] = {"model": "m", "transfer_backend": "kit"}
DRAIN_TIMEOUT_S = 5.0
HEARTBEAT_S, MISSES, BOOTSTRAP_S, WAITING_S = 2.0, 3, 60.0, 100.0


class Net:
    """Frames on their way, in order. `drop` decides what is lost."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.frames: list[tuple[str, bytes]] = []
        self.seen: list[Packet] = []
        self.sides: dict[str, Side] = {}
        self.everybody: list[Side] = []
        self.drop: Callable[[Packet], bool] = lambda packet: False
        self.sources: dict[str, str] = {}
        """Addresses that frames of an instance come from."""

    def pump(self) -> None:
        """Deliver until nothing moves, and all acks are out."""
        wire = Wire(TOKEN)
        while self.report_engines() or self.frames or self._acks():
            if not self.frames:
                continue
            endpoint, frame = self.frames.pop(0)
            packet = wire.decode(frame)
            self.seen.append(packet)
            side = self.sides.get(endpoint)
            if side is not None and not self.drop(packet):
                side.kv.handle(FrameArrived(frame, self.sources.get(packet.sender, "")))

    def report_engines(self) -> bool:
        """What engines have to report of receivers is handled."""
        reports = [(side, side.engine.events.pop(0)) for side in self.everybody if side.engine.events]
        for side, event in reports:
            side.kv.handle(event)
        return bool(reports)

    def _acks(self) -> bool:
        for side in list(self.sides.values()):
            side.kv.flush()
        return bool(self.frames)

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        """Everybody ticks and hears all the while."""
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            for side in list(self.sides.values()):
                side.kv.tick()
            self.pump()

    def said(self, kind: type[Body]) -> list[Body]:
        """Bodies of that kind that were sent so far, repeats included."""
        return [packet.body for packet in self.seen if isinstance(packet.body, kind)]


class KitSocket:
    """`ControlSocket` into a `Net`."""

    def __init__(self, net: Net, endpoint: str) -> None:
        self.endpoint = endpoint
        self.forgotten: list[str] = []
        self._net = net

    def send(self, endpoint: str, frame: bytes) -> None:
        self._net.frames.append((endpoint, frame))

    def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)


class KitEngine:
    """`CopyEngine` whose jobs end when the test says so."""

    drain_timeout_s = DRAIN_TIMEOUT_S

    def __init__(self, notifies: bool = False, addresses: Sequence[str] = ()) -> None:
        self.notifies = notifies
        self.fence_drain_timeout_s = 0.0
        self.fences = True
        """What fences end with."""
        self.fenced: list[tuple[int, str]] = []
        self.allowed: list[tuple[int, str, tuple[str, ...]]] = []
        self.events: list[TransferEvent] = []
        """Reports that `Net.pump` delivers."""
        self._addresses = addresses
        self.expected: list[tuple[MemoryKey, int, int]] = []
        self.notified = False
        self.connects = True
        self.asked: list[tuple[int, str]] = []
        self.jobs: list[CopyJob] = []
        self.cancelled: list[CopyJob] = []
        self.forgotten: list[str] = []

    def connect(self, rank: int, transport_address: str) -> bool:
        self.asked.append((rank, transport_address))
        return self.connects

    def submit(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def cancel(self, job: CopyJob) -> None:
        self.cancelled.append(job)

    def forget(self, transport_address: str) -> None:
        self.forgotten.append(transport_address)

    def open_receiver(self, rank: int, peer: str) -> None:
        self.events.append(ReceiverOpened(peer, self._addresses[rank], None, rank))

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        self.allowed.append((rank, peer, tuple(addresses)))

    def fence(self, rank: int, peer: str) -> None:
        self.fenced.append((rank, peer))
        self.events.append(PeerFenced(peer, self.fences, rank))

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        self.expected.append((key, rank, count))
        return self.notified


class KitDirectory:
    """`Directory` that writes down what it is asked."""

    def __init__(self) -> None:
        self.finds: list[Address] = []
        self.probes: list[tuple[str, str]] = []

    def find(self, address: Address) -> None:
        self.finds.append(address)

    def probe(self, instance: str, endpoint: str) -> None:
        self.probes.append((instance, endpoint))


class Side:
    """One server's transfer half, with pools of 16 pages that are only counted, unless `buffer` says where they lie."""

    def __init__(
        self,
        net: Net,
        instance: str,
        *,
        endpoint: str | None = None,
        facts: dict[str, str | int] | None = None,
        token: str = TOKEN,
        page_tokens: int = 4,
        num_layers: int = 3,
        dtype: str = "uint64",
        buffer: tuple[int, int] | None = None,
        transport_address: str | None = None,
        num_heads: int = 1,
        shape: ParallelShape = SINGLE.shape,
        others: Sequence[RankMemory] = (),
        host_addresses: tuple[str, ...] = (),
        dp_size: int = 1,
        dp_attention: bool = False,
        peer_sizes: Mapping[str, int] | None = None,
        notifies: bool = False,
    ) -> None:
        self.net, self.instance = net, instance
        self.endpoint = endpoint or f"{instance}:1"
        self.pages, self.aux_slots = LeasePool(PageAllocator(16)), LeasePool(PageAllocator(4))
        self.socket, self.directory = KitSocket(net, self.endpoint), KitDirectory()
        group = attention_group(
            num_layers=num_layers, page_tokens=page_tokens, num_kv_heads=num_heads, head_dim=1, dtype=dtype
        )
        layout = KVLayout((group,))
        first = buffer or (1 << 20, 16 * group.of_rank(shape.coord(0)).page_bytes)
        ranks = (rank_memory(layout, shape.coord(0), transport_address or instance, [first], host_addresses), *others)
        self.engine = KitEngine(notifies, [rank.transport_address for rank in ranks])
        args = KVArgs(
            instance=instance,
            layout=layout,
            shape=shape,
            dp_size=dp_size,
            dp_attention=dp_attention,
            peer_sizes=peer_sizes or {},
            ranks=ranks,
            aux=MetadataBuffers(4, shareable=False),
            facts=FACTS if facts is None else facts,
            token=token,
            secret=instance,
        )
        times = TransferTimes(
            bootstrap_timeout_s=BOOTSTRAP_S,
            waiting_timeout_s=WAITING_S,
            sessions=SessionTimes(heartbeat_s=HEARTBEAT_S, misses=MISSES),
        )
        self.kv = KVManager(args, self.socket, self.engine, self.directory, net.clock, times)
        net.sides[self.endpoint] = self
        net.everybody.append(self)

    @property
    def free(self) -> tuple[int, int]:
        """Free pages and aux slots; all free is (16, 4)."""
        return self.pages.num_free, self.aux_slots.num_free

    def leases(self, num_pages: int = 3) -> tuple[Lease, Lease]:
        """Pages and an aux slot."""
        lease, aux = self.pages.reserve(num_pages), self.aux_slots.reserve(1)
        assert lease is not None and aux is not None
        return lease, aux

    def end_jobs(self, failure: Failure | None = None, *, settled: bool = True) -> None:
        """All submitted jobs end, in the same way."""
        jobs, self.engine.jobs = self.engine.jobs, []
        for job in jobs:
            self.kv.handle(CopyDone.of(job, failure, settled=settled, write_s=0.1))


ALL_FREE = (16, 4)


def found(decode: Side, prefill: Side, address: Address = ADDRESS) -> None:
    """The directory of `decode` answers."""
    decode.kv.handle(PrefillFound(address, ((prefill.instance, prefill.endpoint),)))


def meet(**decode_changes: object) -> tuple[Net, Side, Side]:
    """A prefill and a decode server with a session."""
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1", **decode_changes)  # type: ignore[arg-type]
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()
    return net, prefill, decode


class Pair:
    """One request on both servers, opened and published: a prompt of three pages, the first of them cached perhaps."""

    def __init__(
        self,
        net: Net,
        prefill: Side,
        decode: Side,
        room: int = 7,
        digest: str = "d",
        cached_tokens: int = 0,
        takes_logprobs: bool = False,
    ) -> None:
        self.net, self.prefill, self.decode, self.room = net, prefill, decode, room
        self.receiver: KVReceiver = decode.kv.open_receiver(room, ADDRESS, digest, takes_logprobs=takes_logprobs)
        self.theirs = decode.leases()
        self.receiver.publish(*self.theirs, cached_tokens)
        self.sender: KVSender = prefill.kv.open_sender(room, ADDRESS[0], digest, num_tokens=12)
        self.mine = prefill.leases()
        net.pump()

    def send(self) -> None:
        """All pages and the aux slot are submitted."""
        self.sender.send(self.mine[0], 3)
        self.sender.finish(self.mine[1], AuxRecord(self.room, 0, 42), TransferStats(prefill_s=1.0))

    def drop_requests(self) -> None:
        """Both requests end and let go of everything of theirs."""
        self.sender.close()
        self.receiver.close()
        for lease in (*self.mine, *self.theirs):
            lease.drop("request")


def assert_quiet_and_free(*sides: Side) -> None:
    """Nothing is under way there, and all pages are free."""
    for side in sides:
        assert side.kv.quiet and side.free == ALL_FREE, (side.instance, side.kv.counts(), side.free)


def say(net: Net, sender: str, to: Side, body: Body, *, session: int | None = None) -> None:
    """A process that knows the token says something; in the session that `to` has with it unless told otherwise."""
    if session is None:
        peer = to.kv.sessions.peer(sender)
        session = 0 if peer is None else peer.session
    packet = Packet(sender=sender, receiver=to.instance, session=session, seq=1 << 40, body=body)
    to.kv.handle(FrameArrived(Wire(TOKEN).encode(packet)))
    net.pump()


def hello_of(net: Net, side: Side) -> Hello:
    """The first Hello that `side` sent."""
    return next(p.body for p in net.seen if p.sender == side.instance and isinstance(p.body, Hello))


def state_of(side: Side, instance: str) -> PeerState | None:
    """State of the session that `side` has with a peer; None: it has none."""
    peer = side.kv.sessions.peer(instance)
    return None if peer is None else peer.state
