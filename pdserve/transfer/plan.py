"""Plans copies: which bytes of the source KV pool go where in the destination KV pool. Pure.

`plan_flow` depends on layouts only. `ChunkPlanner` plans one chunk (pages times layers) of a request for `SendSide`: it
knows the pool addresses of local and peer ranks, the layer ranges, and when each layout group is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.errors import HandshakeError
from pdserve.memory.draft_groups import draft_fields, draft_groups, without_drafts
from pdserve.memory.layout import STATE_TYPES, KVGroup, KVLayout, Plane
from pdserve.transfer.wire import Hello, RankMemory, StateFacts, StatePlane, StateRegion, WireRegion


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFlow:
    """Rank `source_rank` sends `layers`, and of each plane `heads[plane]`, to rank `destination_rank`.

    All are numbers within the model. `heads` may be empty for some planes.
    """

    source_rank: int
    destination_rank: int
    layers: tuple[int, ...]
    heads: tuple[range, ...]


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
    """Return all flows of `group` (the whole model's), ordered by destination rank, stage and source rank."""
    found = []
    for rank in range(destination.num_ranks):
        coord = destination.coord(rank)
        for stage in range(source.pp_size):
            held = set(group.layers_of(source.coord(stage * source.tp_size)))
            layers = tuple(layer for layer in group.layers_of(coord) if layer in held)
            if not layers:
                continue
            by_plane = [_head_sources(plane, source, coord) for plane in group.planes]
            found += [
                ShardFlow(stage * source.tp_size + tp_rank, rank, layers, heads)
                for tp_rank in range(source.tp_size)
                if any(heads := tuple(sources.get(tp_rank, range(0)) for sources in by_plane))
            ]
    return tuple(found)


def _head_sources(plane: Plane, source: ParallelShape, destination: RankCoord) -> dict[int, range]:
    """Return the heads of `plane` that each tensor rank of a source stage sends to `destination`.

    Of several ranks with the same heads one sends, chosen by the tensor rank of `destination`.
    """
    holders: dict[range, list[int]] = {}
    for tp_rank in range(source.tp_size):
        holders.setdefault(plane.heads_of(source.coord(tp_rank)), []).append(tp_rank)
    wanted = plane.heads_of(destination)
    return {
        ranks[destination.tp_rank % len(ranks)]: heads
        for held, ranks in holders.items()
        if (heads := _overlap(held, wanted))
    }


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
    """The part of a model's group that one rank's pages hold. `group` is the rank's own; the numbers are the model's.

    `heads` has one range per plane. `first_layer`: number of the first of `layers` within the model's group.
    """

    group: KVGroup
    layers: tuple[int, ...]
    heads: tuple[range, ...]
    first_layer: int

    @classmethod
    def of(cls, group: KVGroup, coord: RankCoord) -> RankShard:
        """Return the shard of the rank at `coord`; `group` is the whole model's."""
        layers = group.layers_of(coord)
        first = group.layers.index(layers[0]) if layers else 0
        return cls(group.of_rank(coord), layers, group.heads_of(coord), first)

    def offset(self, layer: int, plane: int = 0, head: int | None = None) -> int:
        """Return the byte offset of a head of a plane of a layer within a page; None: the plane's first head here.

        Layer and head are numbers within the model.
        """
        skipped = 0 if head is None else head - self.heads[plane].start
        start = self.layers.index(layer) * self.group.layer_bytes + self.group.plane_offsets[plane]
        return start + skipped * self.group.planes[plane].head_bytes


@functools.lru_cache(maxsize=1024)
def state_facts(layout: KVLayout, coord: RankCoord) -> tuple[StateFacts, ...]:
    """Return type and geometry of the state pools of the rank at `coord`. `layout` is the whole model's."""
    found = []
    for group in layout.state_groups:
        shard = RankShard.of(group, coord)
        parts = zip(shard.group.planes, shard.group.plane_offsets, shard.heads, strict=True)
        planes = tuple(
            StatePlane(plane.name, offset, plane.head_bytes, heads.start, len(heads)) for plane, offset, heads in parts
        )
        own = shard.group
        found.append(
            StateFacts(group.name, STATE_TYPES[group.kind], own.page_bytes, own.layer_bytes, shard.layers, planes)
        )
    return tuple(found)


def rank_memory(
    layout: KVLayout,
    coord: RankCoord,
    transport_address: str,
    buffers: Sequence[tuple[int, int]],
    host_addresses: tuple[str, ...] = (),
) -> RankMemory:
    """Return the memory of the rank at `coord`, whose pools are `buffers`, `(address, bytes)` for each group.

    `layout` is the whole model's, with DRAFT groups.
    """
    layout, num_drafts = without_drafts(layout), len(draft_groups(layout))
    cut = len(buffers) - num_drafts
    kv, of_state = layout.split(buffers[:cut])
    state = zip(of_state, state_facts(layout, coord), strict=True)
    return RankMemory(
        transport_address,
        tuple(WireRegion(*buffer) for buffer in kv),
        host_addresses,
        tuple(StateRegion(*buffer, facts) for buffer, facts in state),
        tuple(WireRegion(*buffer) for buffer in buffers[cut:]),
    )


def pool_regions(layout: KVLayout, memory: RankMemory) -> tuple[WireRegion | StateRegion, ...]:
    """Return the pools of a rank, one for each group of `layout`, which has no DRAFT groups."""
    return layout.merge(memory.kv_regions, memory.state_regions)


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPattern:
    """Copies to make for every page: `runs` of (offset in the source page, offset in the destination page, bytes).

    `whole`: the only run covers both pages.
    """

    source_page_bytes: int
    destination_page_bytes: int
    runs: tuple[tuple[int, int, int], ...]
    whole: bool

    def copies(self, source_pages: Sequence[int], destination_pages: Sequence[int]) -> list[PageCopy]:
        """Return the copies from each source page to the destination page of the same index. Both lists are equally
        long.
        """
        assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
        if self.whole:
            return _whole_pages(source_pages, destination_pages, self.source_page_bytes)
        runs = np.asarray(self.runs, dtype=np.int64)
        sources = np.asarray(source_pages, dtype=np.int64)[:, None] * self.source_page_bytes + runs[:, 0]
        targets = np.asarray(destination_pages, dtype=np.int64)[:, None] * self.destination_page_bytes + runs[:, 1]
        sizes = runs[:, 2].tolist()
        return list(map(PageCopy, sources.ravel().tolist(), targets.ravel().tolist(), itertools.cycle(sizes)))


@functools.lru_cache(maxsize=1024)
def copy_pattern_of(
    group: KVGroup, source: RankCoord, destination: RankCoord, flow: ShardFlow, layers: range | None
) -> CopyPattern | None:
    """Return the copy pattern of `flow`, restricted to `layers` (numbers within the model); None when no bytes are
    left.

    Runs that are adjacent on both sides are one. So where both sides have the same heads, one run carries all layers.
    """
    wanted = flow.layers if layers is None else tuple(layer for layer in flow.layers if layer in layers)
    if not wanted:
        return None
    ours, theirs = RankShard.of(group, source), RankShard.of(group, destination)
    if ours.heads == theirs.heads == flow.heads:
        parts = [(ours.offset(layer), theirs.offset(layer), ours.group.layer_bytes) for layer in wanted]
    else:
        parts = [
            (ours.offset(layer, index, heads.start), theirs.offset(layer, index, heads.start), len(heads) * head_bytes)
            for layer in wanted
            for index, (heads, head_bytes) in enumerate(zip(flow.heads, _head_bytes(group), strict=True))
            if heads
        ]
    runs = _joined(parts)
    page_bytes = ours.group.page_bytes, theirs.group.page_bytes
    return CopyPattern(*page_bytes, runs, whole=page_bytes[0] == page_bytes[1] and runs == ((0, 0, page_bytes[0]),))


def _head_bytes(group: KVGroup) -> list[int]:
    return [plane.head_bytes for plane in group.planes]


def _joined(parts: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Join consecutive runs that are adjacent on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, destination, num_bytes in parts:
        if runs and (source, destination) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + num_bytes)
        else:
            runs.append((source, destination, num_bytes))
    return tuple(runs)


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


Region = tuple[int, int]
"""An address, and a number of bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class _GroupCopy:
    """Copy `layers` (None: all) of a group from pages `source` to pages `target`. Pool addresses are by rank."""

    group: KVGroup
    layers: range | None
    source: Sequence[int]
    target: Sequence[int]
    source_bases: Sequence[int]
    target_bases: Sequence[int]


@dataclasses.dataclass(frozen=True)
class ChunkPlanner:
    """Plans chunk copies. `layout` is that of the whole model, without DRAFT groups.

    `kv_bases[rank]` are the pool addresses of a local rank, one per layout group. `aux_base` is the address of the aux
    slots, which are at rank 0. `drafts` are the DRAFT groups, `draft_facts` what a peer must have alike to get them. A
    peer with other `draft_facts` gets `aux_common_bytes` of an aux slot (None: all bytes).
    """

    layout: KVLayout
    shape: ParallelShape
    kv_bases: tuple[tuple[int, ...], ...]
    aux_base: int
    aux_slot_bytes: int
    drafts: tuple[KVGroup, ...] = ()
    draft_bases: tuple[tuple[int, ...], ...] = ()
    draft_facts: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    aux_common_bytes: int | None = None

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        shape: ParallelShape,
        ranks: Sequence[RankMemory],
        aux: Region,
        *,
        draft_facts: Mapping[str, str | int] | None = None,
        aux_common_bytes: int | None = None,
    ) -> ChunkPlanner:
        """Return the planner of a server whose ranks have the memory `ranks`. `layout` may have DRAFT groups.

        `aux`: address of the aux slots, and bytes of a slot. `draft_facts` None: those of the layout alone.
        """
        base = without_drafts(layout)
        kv_bases = tuple(tuple(region.address for region in pool_regions(base, rank)) for rank in ranks)
        draft_bases = tuple(tuple(region.address for region in rank.draft_regions) for rank in ranks)
        facts = draft_fields(layout) if draft_facts is None else draft_facts
        return cls(base, shape, kv_bases, *aux, draft_groups(layout), draft_bases, facts, aux_common_bytes)

    def sends_drafts(self, peer: Hello) -> bool:
        """Return whether the pages of DRAFT groups are sent to `peer`: it has equal ones."""
        return bool(self.drafts) and peer.draft_facts == self.draft_facts

    def aux_bytes(self, peer: Hello) -> int:
        """Return the leading bytes of an aux slot that are sent to `peer`."""
        has_all = self.aux_common_bytes is None or self.sends_drafts(peer)
        return self.aux_slot_bytes if has_all else self.aux_common_bytes or 0

    def rank_pairs(self, peer: Hello) -> tuple[RankPair, ...]:
        """Return the (local rank, peer rank address) pairs between which data flows, the aux slots' pair included."""
        groups = (*self.layout.groups, *(self.drafts if self.sends_drafts(peer) else ()))
        ends = {(flow.source_rank, flow.destination_rank) for group in groups
                for flow in shard_flows(group, self.shape, peer.shape)}  # fmt: skip
        return tuple((rank, peer.ranks[target].transport_address) for rank, target in sorted(ends | {(0, 0)}))

    def layer_ranges(self, ranges: Sequence[range]) -> Sequence[range]:
        """Return `ranges`, which must together cover the model's layers once, in order; empty: one range."""
        num_layers = self.layout.num_layers
        if not ranges:
            return [range(num_layers)]
        assert all(ranges) and [layer for layers in ranges for layer in layers] == list(range(num_layers)), ranges
        return ranges

    def pages(
        self, peer: Hello, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]], layers: range
    ) -> list[ChunkPart]:
        """Plan the copies of `layers` (numbers within the model) from the local pages `source` to the peer's `target`.

        Both have one page list per group, of equal lengths; an empty list sends nothing of that group. All layers of
        DRAFT groups go with the model's last layer: they are computed behind it.
        """
        pieces: dict[tuple[int, int], list[Piece]] = {}
        regions = [pool_regions(self.layout, rank) for rank in peer.ranks]
        wanted = [
            _GroupCopy(group, layers, source[index], target[index],
                       [bases[index] for bases in self.kv_bases], [pools[index].address for pools in regions])
            for index, group in enumerate(self.layout.groups)
        ]  # fmt: skip
        if layers.stop == self.layout.num_layers and self.sends_drafts(peer):
            wanted += [
                _GroupCopy(group, None, source[0], target[0], [bases[index] for bases in self.draft_bases],
                           [rank.draft_regions[index].address for rank in peer.ranks])
                for index, group in enumerate(self.drafts)
            ]  # fmt: skip
        for copy in wanted:
            if not copy.source:
                continue
            for flow in shard_flows(copy.group, self.shape, peer.shape):
                ours, theirs = self.shape.coord(flow.source_rank), peer.shape.coord(flow.destination_rank)
                copies = plan_flow(copy.group, ours, theirs, flow, copy.source, copy.target, copy.layers)
                if copies:
                    ends = (flow.source_rank, flow.destination_rank)
                    base, address = copy.source_bases[flow.source_rank], copy.target_bases[flow.destination_rank]
                    pieces.setdefault(ends, []).append((base, address, tuple(copies)))
        return [
            ChunkPart(rank, peer.ranks[target_rank].transport_address, tuple(found), layers.stop)
            for (rank, target_rank), found in pieces.items()
        ]

    def with_aux(self, parts: Sequence[ChunkPart], peer: Hello, source_slot: int, target_slot: int) -> list[ChunkPart]:
        """Add the copy of an aux slot to `parts`: as the last piece of the last part for the same rank pair, else as a
        new part.
        """
        target = target_slot * peer.aux_slot_bytes
        copy = PageCopy(source_slot * self.aux_slot_bytes, target, self.aux_bytes(peer))
        aux = ChunkPart(0, peer.ranks[0].transport_address, ((self.aux_base, peer.aux_region.address, (copy,)),))
        for index in reversed(range(len(parts))):
            part = parts[index]
            if (part.rank, part.transport_address) == (aux.rank, aux.transport_address):
                joined = dataclasses.replace(part, pieces=part.pieces + aux.pieces)
                return [*parts[:index], joined, *parts[index + 1 :]]
        return [*parts, aux]
