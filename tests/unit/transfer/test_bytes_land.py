"""Real bytes from pool to pool through both managers: exactly the pages and layers that were to be sent, no other."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.memory.layout import KVGroup, pages_for
from pdserve.sim.hash_lm import hash_layout
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import CopyDone, CopyJob
from pdserve.transfer.room import KVPoll
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.wire import TransferStats
from tests.unit.transfer.kit import ADDRESS, Net, Side, found

NUM_POOL_PAGES = 16
Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one job must bring: which layers of which pages of the request."""

    pages: range
    layers: range
    layer_events: LayerEvents


class Memory:
    """A server's pool in real memory, random at first, and its transport."""

    def __init__(self, net: Net, hub: MemoryHub, name: str, group: KVGroup, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.pool: Bytes = rng.integers(0, 256, NUM_POOL_PAGES * group.page_bytes, dtype=np.uint8)
        self.transport = MemoryTransport(hub)
        self.side = Side(
            net,
            name,
            page_tokens=group.page_tokens,
            num_layers=group.num_layers,
            buffer=(self.pool.ctypes.data, self.pool.nbytes),
            transport_address=self.transport.address(),
        )
        regions = [(self.pool.ctypes.data, self.pool.nbytes), self.side.kv.args.aux.buffer]
        self.transport.register([MemoryRegion(*region) for region in regions])

    def shuffle(self, order: list[int]) -> None:
        """Pages will be given in this order."""
        allocator = self.side.pages.allocator
        assert allocator.take(NUM_POOL_PAGES) is not None
        allocator.give_back(order)

    def run(self, job: CopyJob) -> None:
        """Do what a copy worker does."""
        copies = [
            Copy(source + copy.source, destination + copy.destination, copy.num_bytes)
            for source, destination, piece in job.pieces
            for copy in piece
        ]
        self.transport.write(job.transport_address, copies)
        self.side.kv.handle(CopyDone.of(job, None, settled=True, write_s=0.0))


def _cuts(draw: st.DrawFn, end: int, label: str) -> list[range]:
    """`[0, end)` in pieces."""
    inner = draw(st.sets(st.integers(1, end - 1)), label=label) if end > 1 else set()
    points = [0, *sorted(inner), end]
    return [range(a, b) for a, b in itertools.pairwise(points)]


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_exactly_the_missing_pages_land_layer_by_layer(data: st.DataObject) -> None:
    group = hash_layout(data.draw(st.integers(1, 4), label="page_tokens"), data.draw(st.integers(1, 5))).groups[0]
    num_tokens = data.draw(st.integers(1, 10 * group.page_tokens), label="num_tokens")
    num_pages = pages_for(num_tokens, group.page_tokens)
    num_cached = data.draw(st.integers(0, num_tokens // group.page_tokens), label="num_cached")
    num_spare = data.draw(st.integers(0, 3), label="pages for what decode will generate")

    net, hub = Net(), MemoryHub()
    prefill = Memory(net, hub, "prefill-1", group, seed=1)
    decode = Memory(net, hub, "decode-1", group, seed=2)
    decode.side.kv.sessions.dial(ADDRESS)
    found(decode.side, prefill.side)
    for memory in (prefill, decode):
        memory.shuffle(data.draw(st.permutations(range(NUM_POOL_PAGES)), label="free list"))
    mine, my_slot = prefill.side.leases(num_pages)
    theirs, their_slot = decode.side.leases(num_pages + num_spare)

    receiver = decode.side.kv.open_receiver(7, ADDRESS, "d")
    sender = prefill.side.kv.open_sender(7, ADDRESS[0], "d", num_tokens)
    net.pump()
    receiver.publish(theirs, their_slot, num_cached * group.page_tokens)
    net.pump()

    expected: list[Expected] = []
    for chunk in _cuts(data.draw, num_pages, "chunks"):
        layers = data.draw(st.booleans(), label="layer by layer")
        ranges = _cuts(data.draw, group.num_layers, "layer groups") if layers else [range(group.num_layers)]
        events = CountedLayerEvents(range(group.num_layers)) if layers else ALL_WRITTEN
        sender.send(mine, chunk.stop, ranges if layers else (), events)
        missing = range(max(chunk.start, num_cached), chunk.stop)
        if missing:
            expected += [Expected(missing, part, events) for part in ranges]
    sender.finish(my_slot, AuxRecord(7, 0, 42), TransferStats())

    jobs = prefill.side.engine.jobs
    assert [job.layer_events for job in jobs] == [*(entry.layer_events for entry in expected), ALL_WRITTEN]
    assert [job.num_layers for job in jobs] == [*(entry.layers.stop for entry in expected), 0]
    before = prefill.pool.copy()
    shape = (NUM_POOL_PAGES, group.num_layers, group.layer_bytes)
    source, wanted = before.reshape(shape), decode.pool.reshape(shape).copy()
    for index in data.draw(st.permutations(range(len(jobs))), label="the order in which jobs run"):
        assert sender.poll() is KVPoll.TRANSFERRING
        prefill.run(jobs[index])
        if index < len(expected):
            for page in expected[index].pages:
                for layer in expected[index].layers:
                    wanted[theirs.pages[page], layer] = source[mine.pages[page], layer]
        assert (decode.pool == wanted.ravel()).all()
    net.pump()

    assert (prefill.pool == before).all(), "the source is only read"
    assert sender.poll() is receiver.poll() is KVPoll.SUCCESS
    record = receiver.take(their_slot)
    assert record is not None and record.first_token == 42
    num_sent = num_pages - num_cached
    aux_bytes = decode.side.kv.args.aux.slot_bytes
    assert receiver.stats.num_pages == num_sent
    assert receiver.stats.num_bytes == num_sent * group.page_bytes + aux_bytes
    for page in range(num_cached, num_pages):
        assert (wanted[theirs.pages[page]] == source[mine.pages[page]]).all(), "all layers have come"
