"""Plans copies: which bytes of the source KV pool go where in the destination KV pool. Pure.

`plan_flow` depends on layouts only. `ChunkPlanner` plans one chunk (pages times layers) of a request for `SendSide`: it
knows the pool addresses of local and peer ranks, the layer ranges, and when each layout group is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.errors import HandshakeError
from pdserve.memory.layout import KVGroup, KVLayout
from pdserve.transfer.wire import Hello


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFlow:
    """Rank `source_rank` sends `layers` x `heads` (numbers within the model) to rank `destination_rank`."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def check_shapes(prefill: ParallelShape, decode: ParallelShape) -> None:
    """Check that the parallel sizes of two servers work together.

    The tensor parallel sizes may differ. The pipeline parallel size of decode must be 1 or equal prefill's.

    Raises:
        HandshakeError: naming `pp_size`.
    """
    if decode.pp_size not in (1, prefill.pp_size):
        raise HandshakeError("pp_size", f"{prefill.pp_size} on prefill", f"{decode.pp_size} on decode")


@functools.lru_cache(maxsize=256)
def shard_flows(group: KVGroup, source: ParallelShape, destination: ParallelShape) -> tuple[ShardFlow, ...]:
    """Return all flows of `group` (the whole model's), ordered by destination rank, layers and heads."""
    found = []
    for rank in range(destination.num_ranks):
        coord = destination.coord(rank)
        for stage in range(source.pp_size):
            layers = _overlap(group.layers_of(coord), group.layers_of(source.coord(stage * source.tp_size)))
            if layers:
                found += [
                    ShardFlow(stage * source.tp_size + tp_rank, rank, layers, heads)
                    for tp_rank, heads in _head_sources(group, source, coord.tp_rank, group.heads_of(coord))
                ]
    return tuple(found)


def _head_sources(group: KVGroup, source: ParallelShape, asker: int, wanted: range) -> list[tuple[int, range]]:
    """Return the source stage's tensor ranks, each with the subset of `wanted` heads that it sends to tensor rank
    `asker`.
    """
    holders: dict[range, list[int]] = {}
    for tp_rank in range(source.tp_size):
        holders.setdefault(group.heads_of(source.coord(tp_rank)), []).append(tp_rank)
    return [(ranks[asker % len(ranks)], heads) for held, ranks in holders.items() if (heads := _overlap(held, wanted))]


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy `num_bytes` bytes from `source` to `destination`, both byte offsets into the group's pool.

    A msgspec struct, since a request has hundreds of copies and a frozen dataclass takes eight times as long to create.
    """

    source: int
    destination: int
    num_bytes: int


Piece = tuple[int, int, tuple[PageCopy, ...]]
"""Source base address, destination base address, and copies between the two pools."""


@dataclasses.dataclass(frozen=True)
class RankShard:
    """The part of a model's group that one rank's pages hold. `group` is the rank's own; the ranges are the model's."""

    group: KVGroup
    layers: range
    heads: range

    @classmethod
    def of(cls, group: KVGroup, coord: RankCoord) -> RankShard:
        """Return the shard of the rank at `coord`; `group` is the whole model's."""
        return cls(group.of_rank(coord), group.layers_of(coord), group.heads_of(coord))

    def offset(self, layer: int, plane: int, head: int) -> int:
        """Return the byte offset of a head of a layer within a page. The arguments are numbers within the model."""
        return self.group.block(layer - self.layers.start, plane, head - self.heads.start) * self.group.head_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPattern:
    """Copies to make for every page: `num_bytes` from each offset pair in `starts`.

    `starts` has byte offsets within a source page and within a destination page. `whole`: each copy covers both pages.
    """

    source_page_bytes: int
    destination_page_bytes: int
    starts: tuple[tuple[int, int], ...]
    num_bytes: int
    whole: bool

    def copies(self, source_pages: Sequence[int], destination_pages: Sequence[int]) -> list[PageCopy]:
        """Return the copies from each source page to the destination page of the same index. Both lists are equally
        long.
        """
        assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
        if self.whole:
            return _whole_pages(source_pages, destination_pages, self.num_bytes)
        offsets = np.asarray(self.starts, dtype=np.int64)
        sources = np.asarray(source_pages, dtype=np.int64)[:, None] * self.source_page_bytes + offsets[:, 0]
        targets = np.asarray(destination_pages, dtype=np.int64)[:, None] * self.destination_page_bytes + offsets[:, 1]
        return list(map(PageCopy, sources.ravel().tolist(), targets.ravel().tolist(), itertools.repeat(self.num_bytes)))


@functools.lru_cache(maxsize=1024)
def copy_pattern_of(
    group: KVGroup, source: RankCoord, destination: RankCoord, flow: ShardFlow, layers: range | None
) -> CopyPattern | None:
    """Return the copy pattern of `flow`, restricted to `layers` (numbers within the model); None when no bytes are
    left.

    When both sides have the same heads, one copy a page carries all layers; else each run of heads is one copy.
    """
    wanted = (
        flow.layers
        if layers is None
        else range(max(layers.start, flow.layers.start), min(layers.stop, flow.layers.stop))
    )
    if not wanted or not flow.heads:
        return None
    ours, theirs = RankShard.of(group, source), RankShard.of(group, destination)
    page_bytes = ours.group.page_bytes, theirs.group.page_bytes
    if ours.heads == theirs.heads == flow.heads:
        start = (ours.offset(wanted.start, 0, flow.heads.start), theirs.offset(wanted.start, 0, flow.heads.start))
        whole = ours.layers == theirs.layers == wanted
        return CopyPattern(*page_bytes, (start,), len(wanted) * ours.group.layer_bytes, whole)
    starts = tuple(
        (ours.offset(layer, plane, flow.heads.start), theirs.offset(layer, plane, flow.heads.start))
        for layer in wanted
        for plane in range(group.num_planes)
    )
    return CopyPattern(*page_bytes, starts, len(flow.heads) * group.head_bytes, whole=False)


def plan_flow(
    group: KVGroup,
    source: RankCoord,
    destination: RankCoord,
    flow: ShardFlow,
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: range | None = None,
) -> list[PageCopy]:
    """Return the copies that carry the shard of `flow` from each source page to the destination page of the same index.

    `layers` (numbers within the model) restricts the shard; None: all its layers. Whole pages that are adjacent in both
    pools become one copy.
    """
    pattern = copy_pattern_of(group, source, destination, flow, layers)
    return [] if pattern is None else pattern.copies(source_pages, destination_pages)


def _whole_pages(sources: Sequence[int], destinations: Sequence[int], page_bytes: int) -> list[PageCopy]:
    """Return one copy for each run of pages that are adjacent on both sides."""
    copies = []
    first = num_pages = 0
    shift: int | None = None
    for source, destination in zip(sources, destinations, strict=True):
        if destination - source == shift and source == first + num_pages:
            num_pages += 1
            continue
        if shift is not None:
            copies.append(PageCopy(first * page_bytes, (first + shift) * page_bytes, num_pages * page_bytes))
        first, shift, num_pages = source, destination - source, 1
    if shift is not None:
        copies.append(PageCopy(first * page_bytes, (first + shift) * page_bytes, num_pages * page_bytes))
    return copies


RankPair = tuple[int, str]
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

    def rank_pairs(self, peer: Hello) -> tuple[RankPair, ...]:
        """Return the (local rank, peer rank address) pairs between which data flows, the aux slots' pair included."""
        ends = {(flow.source_rank, flow.destination_rank) for group in self.layout.groups
                for flow in shard_flows(group, self.shape, peer.shape)}  # fmt: skip
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

        `target` has one page list per group. `layers` are numbers within the first group, and do not fit the other
        groups. The other groups are sent whole with the last layers of the first group, when all layers are written.
        """
        first = self.layout.groups[0]
        last = layers.stop == first.num_layers
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for index, (group, pages) in enumerate(zip(self.layout.groups, target, strict=True)):
            if group is not first and not last:
                continue
            wanted = layers if group is first else None
            for flow in shard_flows(group, self.shape, peer.shape):
                ours, theirs = self.shape.coord(flow.source_rank), peer.shape.coord(flow.destination_rank)
                copies = plan_flow(group, ours, theirs, flow, source, pages, wanted)
                if copies:
                    base = self.kv_bases[flow.source_rank][index]
                    address = peer.ranks[flow.destination_rank].kv_regions[index].address
                    ends = (flow.source_rank, flow.destination_rank)
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
