"""Plan, then copy: which bytes of the source pool go where in the destination pool.

Pure; knows layouts, not engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pdserve.memory.layout import KVGroup


@dataclasses.dataclass(frozen=True, slots=True)
class PageCopy:
    """`num_bytes` bytes from `source` to `destination`; both are byte offsets into the group's pool."""

    source: int
    destination: int
    num_bytes: int


def plan_pages(
    group: KVGroup, source_pages: Sequence[int], destination_pages: Sequence[int], layers: range | None = None
) -> list[PageCopy]:
    """Copies that bring `layers` (all when None) of each source page to the destination page of the same index.

    A page is one piece across its layers, so a layer range of a page is one copy, and pages that lie side by side
    in both pools become one copy when whole pages are sent.
    Both sides have the same geometry (the handshake saw to it).
    """
    assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
    if not source_pages:
        return []
    source = np.asarray(source_pages, dtype=np.int64)
    destination = np.asarray(destination_pages, dtype=np.int64)
    if layers is not None and len(layers) != group.num_layers:
        offset, size = layers.start * group.layer_bytes, len(layers) * group.layer_bytes
        return [
            PageCopy(s * group.page_bytes + offset, d * group.page_bytes + offset, size)
            for s, d in zip(source.tolist(), destination.tolist(), strict=True)
        ]
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    return [
        PageCopy(s * group.page_bytes, d * group.page_bytes, n * group.page_bytes)
        for s, d, n in zip(source[starts].tolist(), destination[starts].tolist(), lengths.tolist(), strict=True)
    ]
