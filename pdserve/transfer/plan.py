"""Plan, then copy: which bytes of the source pool go where in the destination pool.

Pure; knows layouts, not engines.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.base.parallel import Place
from pdserve.memory.layout import KVGroup
from pdserve.transfer.topology import Feed


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """`num_bytes` bytes from `source` to `destination`; both are byte offsets into the group's pool.

    A struct, since a request has hundreds: a frozen dataclass takes eight times as long to make.
    """

    source: int
    destination: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Window:
    """What of a model's group lies in a rank's pages: `group` is the rank's own."""

    group: KVGroup
    layers: range
    heads: range

    @classmethod
    def of(cls, group: KVGroup, place: Place) -> Window:
        """The window of a rank; `group` is the whole model's."""
        return cls(group.of_rank(place), group.layers_of(place), group.heads_of(place))

    def offset(self, layer: int, plane: int, head: int) -> int:
        """Where a head of a layer begins in a page, in bytes; numbers are the model's."""
        lines = (layer - self.layers.start) * self.group.num_planes + plane
        return (lines * len(self.heads) + head - self.heads.start) * self.group.head_bytes


def plan_feed(
    group: KVGroup,
    source: Place,
    destination: Place,
    feed: Feed,
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: range | None = None,
) -> list[PageCopy]:
    """Copies that bring what `feed` says of each source page to the destination page of the same index.

    `layers`, numbers of the model, restrict it further. Whole pages that lie side by side in both pools become one
    copy; layers whose heads are the same on both sides are one copy a page; else each run of heads is one.
    """
    assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
    wanted = (
        feed.layers
        if layers is None
        else range(max(layers.start, feed.layers.start), min(layers.stop, feed.layers.stop))
    )
    if not source_pages or not wanted or not feed.heads:
        return []
    ours, theirs = Window.of(group, source), Window.of(group, destination)
    sources = np.asarray(source_pages, dtype=np.int64)
    targets = np.asarray(destination_pages, dtype=np.int64)
    if ours.heads == theirs.heads == feed.heads:
        if ours.layers == theirs.layers == wanted:
            return _whole_pages(sources, targets, ours.group.page_bytes)
        starts = [(ours.offset(wanted.start, 0, feed.heads.start), theirs.offset(wanted.start, 0, feed.heads.start))]
        num_bytes = len(wanted) * ours.group.layer_bytes
    else:
        starts = [
            (ours.offset(layer, plane, feed.heads.start), theirs.offset(layer, plane, feed.heads.start))
            for layer in wanted
            for plane in range(group.num_planes)
        ]
        num_bytes = len(feed.heads) * group.head_bytes
    offsets = np.asarray(starts, dtype=np.int64)
    from_offsets = (sources[:, None] * ours.group.page_bytes + offsets[:, 0]).ravel()
    to_offsets = (targets[:, None] * theirs.group.page_bytes + offsets[:, 1]).ravel()
    return list(map(PageCopy, from_offsets.tolist(), to_offsets.tolist(), itertools.repeat(num_bytes)))


def _whole_pages(source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64], page_bytes: int) -> list[PageCopy]:
    """One copy for each run of pages that are neighbours on both sides."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    columns = (source[starts], destination[starts], lengths)
    return list(map(PageCopy, *((column * page_bytes).tolist() for column in columns)))
