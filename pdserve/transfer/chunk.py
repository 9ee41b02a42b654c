"""From a chunk of a request, pages times layers, to the copies that carry it. Pure; called by `SendSide`.

Knows where our pools and a peer's are, which layers go together, and what of several layout groups goes when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.memory.layout import KVLayout
from pdserve.transfer.events import Gates, Piece, Ready
from pdserve.transfer.plan import PageCopy, plan_pages
from pdserve.transfer.wire import Hello


@dataclasses.dataclass(frozen=True)
class ChunkPlanner:
    """`kv_bases` are the addresses of our pools, one per layout group; `aux_base` that of our aux slots."""

    layout: KVLayout
    kv_bases: tuple[int, ...]
    aux_base: int
    aux_slot_bytes: int

    def layer_ranges(self, gates: Gates) -> list[tuple[range, Ready | None]]:
        """Layer ranges of the first group in ascending order, each with its gate; all layers at once without gates."""
        num_layers = self.layout.groups[0].num_layers
        if not gates:
            return [(range(num_layers), None)]
        ranges: list[tuple[range, Ready | None]] = sorted(gates, key=lambda gate: gate[0].start)
        covered = [layer for layers, _ in ranges for layer in layers]
        assert all(layers for layers, _ in ranges) and covered == list(range(num_layers)), gates
        return ranges

    def pages(
        self, peer: Hello, source: Sequence[int], target: Sequence[Sequence[int]], layers: range
    ) -> tuple[Piece, ...]:
        """Copies of `layers` of the first group, from our pages `source` to the peer's `target`, given per group.

        Other groups have layers of their own: they go whole, with the first group's last ones, when all is written.
        """
        first = self.layout.groups[0]
        last = layers.stop == first.num_layers
        return tuple(
            (base, region.address, tuple(plan_pages(group, source, pages, layers if group is first else None)))
            for group, base, region, pages in zip(
                self.layout.groups, self.kv_bases, peer.kv_regions, target, strict=True
            )
            if group is first or last
        )

    def aux(self, peer: Hello, source_slot: int, target_slot: int) -> tuple[Piece, ...]:
        """The copy of an aux slot."""
        size = self.aux_slot_bytes
        return ((self.aux_base, peer.aux_region.address, (PageCopy(source_slot * size, target_slot * size, size),)),)
