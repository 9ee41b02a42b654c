"""Copies as indices into lists of equal blocks, so that an engine prepares each list once. Pure; used by `nixl_engine`.

The list of block size B over spans holds each span's whole blocks of B bytes, in span order:

    spans   |---- 3.5 B ----|      |-- 2 B --|
    blocks  | 0 | 1 | 2 |          | 3 | 4 |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.transfer.transport import Copy

Ints = npt.NDArray[np.int64]

MAX_BLOCKS = 1 << 18
MAX_BLOCKS_PER_COPY = 8
"""Most blocks per copy, on average; longer copies are cheaper to name by address."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Registered memory of one kind: absolute address, length in bytes, device number."""

    address: int
    num_bytes: int
    device: int


class Spans:
    """Spans of one side, sorted by address. Arrays are int64 `[spans]`."""

    def __init__(self, spans: Sequence[Span]) -> None:
        ordered = sorted(spans, key=lambda span: span.address)
        self.starts: Ints = np.array([span.address for span in ordered], dtype=np.int64)
        self.lengths: Ints = np.array([span.num_bytes for span in ordered], dtype=np.int64)
        self.devices: Ints = np.array([span.device for span in ordered], dtype=np.int64)

    def index(self, addresses: Ints) -> Ints:
        """Return the index of the span that holds each address; -1 before the first span."""
        return np.searchsorted(self.starts, addresses, side="right") - 1

    def hold(self, addresses: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
        """Return for each range whether it lies in one span. There must be spans."""
        index = self.index(addresses)
        return (index >= 0) & (addresses + lengths <= (self.starts + self.lengths)[index])

    def num_blocks(self, block_bytes: int) -> int:
        """Return the length of the list of blocks of this size."""
        return int((self.lengths // block_bytes).sum())

    def blocks(self, block_bytes: int) -> Ints:
        """Return the list of blocks, int64 `[blocks, 3]`: (address, bytes, device)."""
        counts = self.lengths // block_bytes
        starts = np.repeat(self.starts, counts) + _ramps(counts) * block_bytes
        return np.stack([starts, np.full(len(starts), block_bytes), np.repeat(self.devices, counts)], axis=1)

    def rows(self, addresses: Ints, lengths: Ints) -> Ints:
        """Return ranges as int64 `[ranges, 3]`: (address, bytes, device)."""
        return np.stack([addresses, lengths, self.devices[self.index(addresses)]], axis=1)

    def offsets(self, addresses: Ints) -> Ints:
        """Return the byte offset of each address within its span."""
        return addresses - self.starts[self.index(addresses)]

    def first_blocks(self, addresses: Ints, block_bytes: int) -> Ints:
        """Return the index of the block that starts at each address."""
        counts = self.lengths // block_bytes
        index = self.index(addresses)
        return (np.cumsum(counts) - counts)[index] + self.offsets(addresses) // block_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """Copies as columns: absolute addresses here and at the peer, and lengths in bytes. One row a copy, none empty."""

    sources: Ints
    destinations: Ints
    lengths: Ints

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> Ranges:
        """Return the columns of `copies`."""
        return cls(  # three lists are three times as fast as one of tuples
            np.array([copy.source for copy in copies], dtype=np.int64),
            np.array([copy.destination for copy in copies], dtype=np.int64),
            np.array([copy.num_bytes for copy in copies], dtype=np.int64),
        )

    def rows(self, chosen: slice | npt.NDArray[np.bool_]) -> Ranges:
        """Return the chosen rows."""
        return Ranges(self.sources[chosen], self.destinations[chosen], self.lengths[chosen])


SpansByKind = Mapping[str, Spans]
"""Spans of each kind of memory, by NIXL's name of the kind: `DRAM`, `VRAM`."""


def split_by_kind(ranges: Ranges, here: SpansByKind, there: SpansByKind) -> list[tuple[tuple[str, str], Ranges]]:
    """Split `ranges` by the kinds of memory (here, there) in which they lie. Sources must lie in `here`.

    Raises:
        ValueError: a destination lies in no span.
    """
    found = []
    lost = np.ones(len(ranges.lengths), dtype=np.bool_)
    for from_kind, sources in here.items():
        for to_kind, destinations in there.items():
            chosen = sources.hold(ranges.sources, ranges.lengths) & destinations.hold(
                ranges.destinations, ranges.lengths
            )
            lost &= ~chosen
            if chosen.any():
                found.append(((from_kind, to_kind), ranges.rows(chosen)))
    if lost.any():
        row = int(np.argmax(lost))
        raise ValueError(f"{ranges.destinations[row]:#x} + {ranges.lengths[row]} bytes is not registered")
    return found


def grid(ranges: Ranges, here: Spans, there: Spans) -> int:
    """Return the largest block size in bytes with which every copy is whole blocks on both sides."""
    columns = (ranges.lengths, here.offsets(ranges.sources), there.offsets(ranges.destinations))
    return int(np.gcd.reduce(np.concatenate(columns)))


def choose_block(ranges: Ranges, here: Spans, there: Spans, known: Sequence[int], max_lists: int) -> int | None:
    """Return the block size for `ranges`: one of `known` if it fits, else a new one; None: name the copies by address.

    A new list is worth preparing only while there are few lists, and when it is not too long.
    """
    widest = grid(ranges, here, there)
    total = int(ranges.lengths.sum())
    for block_bytes in sorted(known, reverse=True):
        if widest % block_bytes == 0:
            return block_bytes if total <= block_bytes * MAX_BLOCKS_PER_COPY * len(ranges.lengths) else None
    fits = all(0 < spans.num_blocks(widest) <= MAX_BLOCKS for spans in (here, there))
    few = total <= widest * MAX_BLOCKS_PER_COPY * len(ranges.lengths)
    return widest if fits and few and len(known) < max_lists else None


def block_indices(
    ranges: Ranges, here: Spans, there: Spans, block_bytes: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return int32 block indices in the lists of `here` and `there`, one pair per block to copy."""
    counts = ranges.lengths // block_bytes
    ramps = _ramps(counts)
    local = np.repeat(here.first_blocks(ranges.sources, block_bytes), counts) + ramps
    remote = np.repeat(there.first_blocks(ranges.destinations, block_bytes), counts) + ramps
    return local.astype(np.int32), remote.astype(np.int32)


def _ramps(counts: Ints) -> Ints:
    """Return 0..n-1 for each n in `counts`, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends - counts, counts)
