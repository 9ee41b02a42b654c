"""Plan, then copy: which bytes of the source pool go where in the destination pool.

Pure; knows layouts, not engines.
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
from pdserve.memory.layout import KVGroup


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFlow:
    """`source_rank` sends `layers` x `heads`, numbers within the model, to `destination_rank`."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def check_shapes(prefill: ParallelShape, decode: ParallelShape) -> None:
    """Which splits may work together: tensor sizes as they like, decode's stages as many as prefill's, or one.

    Raises:
        HandshakeError: naming `pp_size`.
    """
    if decode.pp_size not in (1, prefill.pp_size):
        raise HandshakeError("pp_size", f"{prefill.pp_size} on prefill", f"{decode.pp_size} on decode")


@functools.lru_cache(maxsize=256)
def feeds(group: KVGroup, source: ParallelShape, destination: ParallelShape) -> tuple[ShardFlow, ...]:
    """All feeds of `group`, the whole model's, by destination rank, layers and heads."""
    found = []
    for rank in range(destination.num_ranks):
        place = destination.place(rank)
        for stage in range(source.pp_size):
            layers = _overlap(group.layers_of(place), group.layers_of(source.place(stage * source.tp_size)))
            if layers:
                found += [
                    ShardFlow(stage * source.tp_size + tp_rank, rank, layers, heads)
                    for tp_rank, heads in _head_sources(group, source, place.tp_rank, group.heads_of(place))
                ]
    return tuple(found)


def _head_sources(group: KVGroup, source: ParallelShape, asker: int, wanted: range) -> list[tuple[int, range]]:
    """Tensor ranks of a source stage, each with the heads it gives of those `wanted` by tensor rank `asker`."""
    holders: dict[range, list[int]] = {}
    for tp_rank in range(source.tp_size):
        holders.setdefault(group.heads_of(source.place(tp_rank)), []).append(tp_rank)
    return [(ranks[asker % len(ranks)], heads) for held, ranks in holders.items() if (heads := _overlap(held, wanted))]


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """`num_bytes` bytes from `source` to `destination`; both are byte offsets into the group's pool.

    A struct, since a request has hundreds: a frozen dataclass takes eight times as long to make.
    """

    source: int
    destination: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class RankShard:
    """What of a model's group lies in a rank's pages: `group` is the rank's own."""

    group: KVGroup
    layers: range
    heads: range

    @classmethod
    def of(cls, group: KVGroup, place: RankCoord) -> RankShard:
        """The window of a rank; `group` is the whole model's."""
        return cls(group.of_rank(place), group.layers_of(place), group.heads_of(place))

    def offset(self, layer: int, plane: int, head: int) -> int:
        """Where a head of a layer begins in a page, in bytes; numbers are the model's."""
        lines = (layer - self.layers.start) * self.group.num_planes + plane
        return (lines * len(self.heads) + head - self.heads.start) * self.group.head_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPattern:
    """What of every page goes where: `starts` are offsets within a source page and a destination page, in bytes.

    From each pair of them go `num_bytes`; `whole`: that is all there is of either page.
    """

    source_page_bytes: int
    destination_page_bytes: int
    starts: tuple[tuple[int, int], ...]
    num_bytes: int
    whole: bool

    def copies(self, source_pages: Sequence[int], destination_pages: Sequence[int]) -> list[PageCopy]:
        """Copies from each source page to the destination page of the same index, of which there are as many."""
        assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
        if self.whole:
            return _whole_pages(source_pages, destination_pages, self.num_bytes)
        offsets = np.asarray(self.starts, dtype=np.int64)
        sources = np.asarray(source_pages, dtype=np.int64)[:, None] * self.source_page_bytes + offsets[:, 0]
        targets = np.asarray(destination_pages, dtype=np.int64)[:, None] * self.destination_page_bytes + offsets[:, 1]
        return list(map(PageCopy, sources.ravel().tolist(), targets.ravel().tolist(), itertools.repeat(self.num_bytes)))


@functools.lru_cache(maxsize=1024)
def route_of(
    group: KVGroup, source: RankCoord, destination: RankCoord, feed: ShardFlow, layers: range | None
) -> CopyPattern | None:
    """The route of `feed`, restricted to `layers`, numbers of the model; None when nothing is left of it.

    Layers whose heads are the same on both sides are one copy a page; else each run of heads is one.
    """
    wanted = (
        feed.layers
        if layers is None
        else range(max(layers.start, feed.layers.start), min(layers.stop, feed.layers.stop))
    )
    if not wanted or not feed.heads:
        return None
    ours, theirs = RankShard.of(group, source), RankShard.of(group, destination)
    page_bytes = ours.group.page_bytes, theirs.group.page_bytes
    if ours.heads == theirs.heads == feed.heads:
        start = (ours.offset(wanted.start, 0, feed.heads.start), theirs.offset(wanted.start, 0, feed.heads.start))
        whole = ours.layers == theirs.layers == wanted
        return CopyPattern(*page_bytes, (start,), len(wanted) * ours.group.layer_bytes, whole)
    starts = tuple(
        (ours.offset(layer, plane, feed.heads.start), theirs.offset(layer, plane, feed.heads.start))
        for layer in wanted
        for plane in range(group.num_planes)
    )
    return CopyPattern(*page_bytes, starts, len(feed.heads) * group.head_bytes, whole=False)


def plan_feed(
    group: KVGroup,
    source: RankCoord,
    destination: RankCoord,
    feed: ShardFlow,
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: range | None = None,
) -> list[PageCopy]:
    """Copies that bring what `feed` says of each source page to the destination page of the same index.

    `layers`, numbers of the model, restrict it further. Whole pages that lie side by side in both pools become one
    copy.
    """
    route = route_of(group, source, destination, feed, layers)
    return [] if route is None else route.copies(source_pages, destination_pages)


def _whole_pages(sources: Sequence[int], destinations: Sequence[int], page_bytes: int) -> list[PageCopy]:
    """One copy for each run of pages that are neighbours on both sides."""
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
