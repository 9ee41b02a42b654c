"""Plans the copies that carry one chunk (pages times layers) of a request. Pure; called by `SendSide`.

`ChunkPlanner` knows the pool addresses of local and peer ranks, the layer ranges, and when each layout group is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import KVLayout
from pdserve.transfer.events import Piece
from pdserve.transfer.plan import PageCopy, feeds, plan_feed
from pdserve.transfer.wire import Hello

Way = tuple[int, str]
"""A local rank, and the transport address of a rank of the peer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPart:
    """Copies from local rank `rank` to the peer's rank at `transport_address`.

    They read layers below `num_layers` of the model.
    """

    rank: int
    transport_address: str
    pieces: tuple[Piece, ...]
    num_layers: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(copy.num_bytes for _, _, copies in self.pieces for copy in copies)


@dataclasses.dataclass(frozen=True)
class ChunkPlanner:
    """Plans chunk copies. `layout` is that of the whole model.

    `kv_bases[rank]` are the pool addresses of a local rank, one per layout group. `aux_base` is the address of the aux
    slots, which are at rank 0.
    """

    layout: KVLayout
    shape: ParallelShape
    kv_bases: tuple[tuple[int, ...], ...]
    aux_base: int
    aux_slot_bytes: int

    def ways(self, peer: Hello) -> tuple[Way, ...]:
        """Return the (local rank, peer rank address) pairs between which data flows, the aux slots' pair included."""
        ends = {(feed.source_rank, feed.destination_rank) for group in self.layout.groups
                for feed in feeds(group, self.shape, peer.shape)}  # fmt: skip
        return tuple((rank, peer.ranks[target].transport_address) for rank, target in sorted(ends | {(0, 0)}))

    def layer_ranges(self, ranges: Sequence[range]) -> Sequence[range]:
        """Return `ranges`, which must together cover the first group's layers once, in order; empty: one range."""
        num_layers = self.layout.groups[0].num_layers
        if not ranges:
            return [range(num_layers)]
        assert all(ranges) and [layer for layers in ranges for layer in layers] == list(range(num_layers)), ranges
        return ranges

    def pages(
        self, peer: Hello, source: Sequence[int], target: Sequence[Sequence[int]], layers: range
    ) -> list[ChunkPart]:
        """Plan the copies of `layers` of the first group, from the local pages `source` to the peer's pages `target`.

        `target` has one page list per group. The layers of the other groups do not match the first group's: these
        groups are sent whole, together with the last layers of the first group, when all layers are written.
        """
        first = self.layout.groups[0]
        last = layers.stop == first.num_layers
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for index, (group, pages) in enumerate(zip(self.layout.groups, target, strict=True)):
            if group is not first and not last:
                continue
            wanted = layers if group is first else None
            for feed in feeds(group, self.shape, peer.shape):
                ours, theirs = self.shape.place(feed.source_rank), peer.shape.place(feed.destination_rank)
                copies = plan_feed(group, ours, theirs, feed, source, pages, wanted)
                if copies:
                    base = self.kv_bases[feed.source_rank][index]
                    address = peer.ranks[feed.destination_rank].kv_regions[index].address
                    ends = (feed.source_rank, feed.destination_rank)
                    pieces.setdefault(ends, []).append((base, address, tuple(copies)))
        return [
            ChunkPart(rank, peer.ranks[target_rank].transport_address, tuple(found), layers.stop)
            for (rank, target_rank), found in pieces.items()
        ]

    def with_aux(self, parts: Sequence[ChunkPart], peer: Hello, source_slot: int, target_slot: int) -> list[ChunkPart]:
        """Add the copy of an aux slot to `parts`: as the last piece of the last part for the same rank pair, else as a
        new part.
        """
        size = self.aux_slot_bytes
        copy = PageCopy(source_slot * size, target_slot * size, size)
        aux = ChunkPart(0, peer.ranks[0].transport_address, ((self.aux_base, peer.aux_region.address, (copy,)),))
        for index in reversed(range(len(parts))):
            part = parts[index]
            if (part.rank, part.transport_address) == (aux.rank, aux.transport_address):
                joined = dataclasses.replace(part, pieces=part.pieces + aux.pieces)
                return [*parts[:index], joined, *parts[index + 1 :]]
        return [*parts, aux]
