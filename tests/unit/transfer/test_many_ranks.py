"""Both managers with replicas of many ranks: each rank's pool gets its bytes, and one rank's failure is all ranks'."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import KVGroup
from pdserve.protocol.failure import Failure
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import CopyDone, CopyJob, PeerGone, PrefillFound
from pdserve.transfer.room import KVPoll
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.wire import Hello, RankMemory, Refusal, TransferStats, WireRegion
from tests.unit.transfer.kit import ADDRESS, ALL_FREE, BOOTSTRAP_S, CLIENT_LEFT, FACTS, Net, Side, found, say
from tests.unit.transfer.kit import meet as meet_one

NUM_HEADS, NUM_LAYERS, PAGE_TOKENS, NUM_PAGES = 4, 5, 2, 16
Bytes = npt.NDArray[np.uint8]
SHAPES = st.builds(ParallelShape, tp_size=st.sampled_from((1, 2, 4, 8)), pp_size=st.integers(1, 3))


class Replica:
    """A server of many ranks in one process: a pool and a transport each, one manager."""

    def __init__(self, net: Net, hub: MemoryHub, name: str, shape: ParallelShape, whole: Bytes) -> None:
        """`whole`: the KV of the whole model `[page, layer, plane, head, byte]`, of which each rank has its share."""
        self.shape = shape
        self.pools: list[Bytes] = []
        self.transports = [MemoryTransport(hub) for _ in range(shape.num_ranks)]
        group = model_group()
        for rank in range(shape.num_ranks):
            coord = shape.coord(rank)
            layers, (heads, _) = group.layers_of(coord), group.heads_of(coord)
            share = whole[:, layers][:, :, :, heads]
            self.pools.append(np.ascontiguousarray(share).reshape(-1))
        regions = [(pool.ctypes.data, pool.nbytes) for pool in self.pools]
        self.side = Side(
            net,
            name,
            page_tokens=PAGE_TOKENS,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            shape=shape,
            buffer=regions[0],
            transport_address=self.transports[0].address(),
            others=[
                RankMemory(transport.address(), (WireRegion(*region),))
                for transport, region in zip(self.transports[1:], regions[1:], strict=True)
            ],
        )
        for rank, transport in enumerate(self.transports):
            aux = [self.side.kv.args.aux.buffer] if rank == 0 else []
            transport.register([MemoryRegion(*region) for region in (regions[rank], *aux)])

    def run(self, job: CopyJob) -> None:
        """What the copy worker of the job's rank does."""
        copies = [
            Copy(source + copy.source, target + copy.destination, copy.num_bytes)
            for source, target, pieces in job.pieces
            for copy in pieces
        ]
        self.transports[job.rank].write(job.transport_address, copies)
        self.side.kv.handle(CopyDone.of(job, None, settled=True, write_s=0.0))

    def run_all(self, rng: random.Random) -> None:
        """All jobs, in any order."""
        jobs, self.side.engine.jobs = self.side.engine.jobs, []
        for job in rng.sample(jobs, len(jobs)):
            self.run(job)


def model_group() -> KVGroup:
    """The whole model's geometry, as `Side` makes it."""
    side = Side(Net(), "x", page_tokens=PAGE_TOKENS, num_layers=NUM_LAYERS, num_heads=NUM_HEADS)
    return side.kv.args.layout.groups[0]


def random_model(seed: int) -> Bytes:
    group = model_group()
    shape = (NUM_PAGES, NUM_LAYERS, group.num_planes, NUM_HEADS, group.head_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def meet(net: Net, prefill: Side, decode: Side) -> None:
    decode.kv.sessions.dial(ADDRESS)
    found(decode, prefill)
    net.pump()


@given(prefill_shape=SHAPES, decode_tp=st.sampled_from((1, 2, 4, 8)), one=st.booleans(), seed=st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None)
def test_every_rank_of_decode_gets_its_bytes(
    prefill_shape: ParallelShape, decode_tp: int, one: bool, seed: int
) -> None:
    rng, net, hub = random.Random(seed), Net(), MemoryHub()
    before = random_model(seed + 1)
    decode_shape = ParallelShape(tp_size=decode_tp, pp_size=1 if one else prefill_shape.pp_size)
    prefill = Replica(net, hub, "prefill-1", prefill_shape, random_model(seed))
    decode = Replica(net, hub, "decode-1", decode_shape, before)
    for side in (prefill.side, decode.side):
        order = rng.sample(range(NUM_PAGES), NUM_PAGES)
        assert side.pages.allocator.take(NUM_PAGES) is not None
        side.pages.allocator.give_back(order)
    meet(net, prefill.side, decode.side)
    num_pages = rng.randint(2, 5)
    receiver = decode.side.kv.open_receiver(7, ADDRESS, "d")
    sender = prefill.side.kv.open_sender(7, ADDRESS[0], "d", num_tokens=num_pages * PAGE_TOKENS)
    theirs, mine = decode.side.leases(num_pages), prefill.side.leases(num_pages)
    cached = rng.randint(0, 1)
    receiver.publish(*theirs, cached * PAGE_TOKENS)
    net.pump()
    cut, chunk = rng.randint(1, NUM_LAYERS - 1), rng.randint(1, num_pages)
    sender.send(mine[0], chunk, [range(cut), range(cut, NUM_LAYERS)] if rng.random() < 0.5 else ())
    sender.send(mine[0], num_pages)
    sender.finish(mine[1], AuxRecord(7, 0, 42), TransferStats())
    prefill.run_all(rng)
    net.pump()
    assert sender.poll() is receiver.poll() is KVPoll.SUCCESS
    source, expected = random_model(seed), before.copy()
    expected[theirs[0].pages[cached:num_pages]] = source[mine[0].pages[cached:num_pages]]
    group = model_group()
    for rank, pool in enumerate(decode.pools):
        coord = decode_shape.coord(rank)
        layers, (heads, _) = group.layers_of(coord), group.heads_of(coord)
        share = expected[:, layers][:, :, :, heads]
        assert (pool == share.reshape(-1)).all(), f"rank {rank} of {decode_shape} fed by {prefill_shape}"


def test_one_rank_that_fails_fails_all_and_the_slowest_decides_when_it_is_over() -> None:
    net, hub = Net(), MemoryHub()
    prefill = Replica(net, hub, "prefill-1", ParallelShape(tp_size=4), random_model(1))
    decode = Replica(net, hub, "decode-1", ParallelShape(tp_size=2), random_model(2))
    meet(net, prefill.side, decode.side)
    receiver = decode.side.kv.open_receiver(7, ADDRESS, "d")
    sender = prefill.side.kv.open_sender(7, ADDRESS[0], "d", num_tokens=3 * PAGE_TOKENS)
    theirs, mine = decode.side.leases(), prefill.side.leases()
    receiver.publish(*theirs)
    net.pump()
    sender.send(mine[0], 3)
    jobs, prefill.side.engine.jobs = prefill.side.engine.jobs, []
    assert sorted(job.rank for job in jobs) == [0, 1, 2, 3]
    assert {job.transport_address for job in jobs} == {transport.address() for transport in decode.transports}
    prefill.run(jobs[0])
    failure = Failure(code="transfer_failed", message="rank 2 cannot")
    prefill.side.kv.handle(CopyDone.of(jobs[2], failure, settled=True, write_s=0.0))
    net.pump()
    assert sender.poll() is receiver.poll() is KVPoll.FAILED
    assert prefill.side.engine.cancelled == [jobs[1], jobs[3]]
    for lease in (*mine, *theirs):
        lease.drop("request")
    assert decode.side.free != ALL_FREE, "two ranks may still write"
    for job in (jobs[1], jobs[3]):
        prefill.side.kv.handle(CopyDone.of(job, failure, settled=True, write_s=0.0))
    net.pump()
    assert decode.side.free == prefill.side.free == ALL_FREE


def test_all_ranks_of_a_dead_peer_are_forgotten() -> None:
    net, hub = Net(), MemoryHub()
    prefill = Replica(net, hub, "prefill-1", ParallelShape(), random_model(1))
    decode = Replica(net, hub, "decode-1", ParallelShape(tp_size=4), random_model(2))
    meet(net, prefill.side, decode.side)
    prefill.side.kv.handle(PeerGone("decode-1"))
    assert prefill.side.engine.forgotten == [transport.address() for transport in decode.transports]


OTHER = RankMemory("r", (WireRegion(1, 1),))
WIDE: dict[str, object] = {"num_heads": 4, "num_layers": 3, "buffer": (1 << 20, 1 << 16)}


@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [
        ({}, {"shape": ParallelShape(pp_size=2), "others": [RankMemory("r", (WireRegion(1, 1),))]}, "pp_size"),
        ({"peer_sizes": {"disaggregation_decode_tp": 2}}, {}, "disaggregation_decode_tp"),
        ({"peer_sizes": {"disaggregation_decode_dp": 1}}, {"dp_size": 2}, "disaggregation_decode_dp"),
        ({}, {"peer_sizes": {"disaggregation_prefill_pp": 2}}, "disaggregation_prefill_pp"),
        ({}, {"num_heads": 2}, "num_kv_heads"),
        (WIDE, WIDE | {"shape": ParallelShape(tp_size=3), "others": [OTHER, OTHER]}, "tp_size"),
        (WIDE, WIDE | {"shape": ParallelShape(pp_size=4), "others": [OTHER] * 3}, "pp_size"),
        ({}, {"facts": FACTS | {"model": "other"}}, "model"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_the_request_hears_it(
    prefill: dict[str, object], decode: dict[str, object], field: str
) -> None:
    net = Net()
    sides = Side(net, "prefill-1", **prefill), Side(net, "decode-1", **decode)  # type: ignore[arg-type]
    receiver = sides[1].kv.open_receiver(7, ADDRESS, "d")
    found(sides[1], sides[0])
    net.pump()
    assert receiver.poll() is KVPoll.FAILED and receiver.failure is not None
    assert field in receiver.failure.message and receiver.failure.code == "handshake_refused"
    assert [side.kv.counters["handshakes_refused"] for side in sides] == [1, 1], "on both sides"


def test_a_decode_server_with_dp_attention_is_known_by_the_size_of_its_flag() -> None:
    net = Net()
    prefill = Side(net, "prefill-1", peer_sizes={"disaggregation_decode_tp": 2, "disaggregation_decode_dp": 2})
    decode = Side(net, "decode-1", dp_size=2, dp_attention=True)
    meet(net, prefill, decode)
    assert prefill.kv.counters["handshakes_refused"] == 0 and prefill.kv.sessions.last_refusal is None


def test_a_hello_with_more_or_fewer_ranks_than_it_says_is_refused() -> None:
    net = Net()
    prefill, decode = Side(net, "prefill-1"), Side(net, "decode-1")
    meet(net, prefill, decode)
    hello = next(hello for hello in net.said(Hello) if isinstance(hello, Hello) and not hello.answer)
    assert prefill.kv.counters["handshakes_refused"] == 0
    wrong = msgspec.structs.replace(hello, tp_size=2, endpoint="decode-2:1", session=77)
    say(net, "decode-2", prefill, wrong, session=77)
    assert prefill.kv.counters["handshakes_refused"] == 1
    assert net.said(Refusal)


def test_a_room_goes_to_the_replica_that_its_number_names() -> None:
    net = Net()
    replicas = [Side(net, f"prefill-{index}", dp_size=3) for index in range(3)]
    decode = Side(net, "decode-1")
    receivers = {room: decode.kv.open_receiver(room, ADDRESS, "d") for room in (3, 4, 5, 7)}
    named = tuple((side.instance, side.endpoint) for side in replicas)
    decode.kv.handle(PrefillFound(ADDRESS, named))
    net.drop = lambda packet: packet.sender == "prefill-1"
    net.pump()
    states = {room: receiver.poll() for room, receiver in receivers.items()}
    waiting = [room for room, state in states.items() if state is KVPoll.WAITING_FOR_INPUT]
    assert waiting == [3, 5], "those of replicas 0 and 2; 4 and 7 are replica 1's, which has not answered"
    net.drop = lambda packet: False
    net.pass_time(3.0)
    for receiver in receivers.values():
        assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
        receiver.publish(*decode.leases(1))
        net.pump()
    assert [side.kv.send_side.num_early for side in replicas] == [1, 2, 1]


def test_pages_are_free_when_every_rank_of_ours_is_fenced() -> None:
    net, hub = Net(), MemoryHub()
    prefill = Replica(net, hub, "prefill-1", ParallelShape(), random_model(1))
    decode = Replica(net, hub, "decode-1", ParallelShape(tp_size=2), random_model(2))
    meet(net, prefill.side, decode.side)
    receiver = decode.side.kv.open_receiver(7, ADDRESS, "d")
    theirs = decode.side.leases()
    receiver.publish(*theirs)
    decode.side.kv.handle(PeerGone("prefill-1"))
    receiver.close()
    for lease in theirs:
        lease.drop("request")
    assert decode.side.engine.fenced == [(0, "prefill-1#1"), (1, "prefill-1#1")]
    first, second = decode.side.engine.events
    decode.side.engine.events.clear()
    decode.side.kv.handle(second)
    decode.side.kv.handle(second)
    assert decode.side.free != ALL_FREE
    decode.side.kv.handle(first)
    assert decode.side.free == ALL_FREE


@pytest.mark.parametrize("first", ["redirect", "info"])
def test_a_room_that_another_replica_has_finds_it(first: str) -> None:
    net = Net()
    replicas = [Side(net, f"prefill-{index}", dp_size=2) for index in range(2)]
    decode = Side(net, "decode-1")
    decode.kv.sessions.dial(ADDRESS)
    decode.kv.handle(PrefillFound(ADDRESS, tuple((side.instance, side.endpoint) for side in replicas)))
    net.pump()
    receiver = decode.kv.open_receiver(4, ADDRESS, "d")
    theirs = decode.leases()
    if first == "redirect":
        replicas[0].kv.redirect(4, "d", 1)
    receiver.publish(*theirs, 4)
    net.pump()
    if first == "info":
        assert replicas[0].kv.send_side.num_early == 1
        replicas[0].kv.redirect(4, "d", 1)
        net.pump()
    sender = replicas[1].kv.open_sender(4, ADDRESS[0], "d", num_tokens=12)
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT and sender.num_cached_tokens == 4
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT and decode.kv.receive_side.num_remote_pages == 3
    mine = replicas[1].leases()
    sender.send(mine[0], 3)
    sender.finish(mine[1], AuxRecord(4, 0, 42), TransferStats())
    replicas[1].end_jobs()
    net.pump()
    assert receiver.poll() is sender.poll() is KVPoll.SUCCESS
    for handle in (receiver, sender):
        handle.close()
    for lease in (*mine, *theirs):
        lease.drop("request")
    assert all(side.kv.quiet and side.free == ALL_FREE for side in (*replicas, decode))
    assert all(side.kv.send_side.num_tombstones == 0 for side in replicas)


@pytest.mark.parametrize("ends", ["session", "abort", "never", "lost"])
def test_a_room_that_a_replica_without_a_session_has_waits_for_that_session(ends: str) -> None:
    net = Net()
    replicas = [Side(net, f"prefill-{index}", dp_size=2) for index in range(2)]
    decode = Side(net, "decode-1")
    decode.kv.sessions.dial(ADDRESS)
    net.drop = lambda packet: packet.sender == "prefill-1"
    decode.kv.handle(PrefillFound(ADDRESS, tuple((side.instance, side.endpoint) for side in replicas)))
    net.pump()
    receiver = decode.kv.open_receiver(4, ADDRESS, "d")
    theirs = decode.leases()
    replicas[0].kv.redirect(4, "d", 1)
    receiver.publish(*theirs)
    net.pump()
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT and receiver.failure is None
    assert not theirs[0].held_by("remote"), "replica 0 has given them back, replica 1 has not heard of them"
    if ends == "session":
        net.drop = lambda packet: False
        net.pass_time(3.0)
        sender = replicas[1].kv.open_sender(4, ADDRESS[0], "d", num_tokens=12)
        mine = replicas[1].leases()
        sender.send(mine[0], 3)
        sender.finish(mine[1], AuxRecord(4, 0, 42), TransferStats())
        replicas[1].end_jobs()
        net.pump()
        assert receiver.poll() is sender.poll() is KVPoll.SUCCESS
        sender.close()
        for lease in mine:
            lease.drop("request")
    elif ends == "abort":
        receiver.abort(CLIENT_LEFT)
        assert receiver.poll() is KVPoll.FAILED
    elif ends == "never":
        net.pass_time(BOOTSTRAP_S + 1.0)
        assert receiver.poll() is KVPoll.FAILED and receiver.failure is not None
        assert receiver.failure.code == "peer_silent" and receiver.failure.retryable
    else:
        decode.kv.handle(PeerGone("prefill-0"))
        assert receiver.poll() is KVPoll.WAITING_FOR_INPUT, "replica 0 has nothing to do with it any more"
    receiver.close()
    for lease in theirs:
        lease.drop("request")
    net.drop = lambda packet: False
    net.pass_time(3.0)
    assert decode.kv.quiet and decode.free == ALL_FREE
    assert not decode.kv.receive_side.rooms and decode.kv.receive_side.num_awaiting_session == 0


def test_a_room_that_went_to_a_replica_that_is_not_there_fails() -> None:
    net, prefill, decode = meet_one()
    receiver = decode.kv.open_receiver(4, ADDRESS, "d")
    theirs = decode.leases()
    receiver.publish(*theirs)
    prefill.kv.redirect(4, "d", 5)
    net.pump()
    assert receiver.poll() is KVPoll.FAILED and receiver.failure is not None and receiver.failure.retryable
    receiver.close()
    for lease in theirs:
        lease.drop("request")
    assert decode.free == ALL_FREE and decode.kv.quiet


def test_who_left_before_being_sent_elsewhere_is_not_sent() -> None:
    net, prefill, decode = meet_one()
    receiver = decode.kv.open_receiver(4, ADDRESS, "d")
    theirs = decode.leases()
    receiver.publish(*theirs)
    receiver.abort(Failure(code="aborted", message="the client left"))
    prefill.kv.redirect(4, "d", 0)
    net.pump()
    assert receiver.poll() is KVPoll.FAILED
    receiver.close()
    for lease in theirs:
        lease.drop("request")
    assert decode.free == ALL_FREE and decode.kv.quiet and prefill.kv.quiet
