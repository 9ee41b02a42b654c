"""KV pages between steps: copied to host memory and back, zeroed, hashed.

`LocalExecutor` copies and zeroes them within the runner's order, so behind all launched steps. On CUDA the host copies
are pinned, in pieces. The device then needs space for one piece only, and torch's cache of pinned memory, which rounds
to powers of two, reuses the pieces. The composition roots make the hasher where KV checksums are enabled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.base.parallel import RankCoord
from pdserve.executor.interface import HostPages, ImportedPages
from pdserve.memory.layout import GroupKind, KVLayout
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import to_device
from pdserve.transfer.checksum import GroupDigest, RankDigest, digest_group
from pdserve.transfer.plan import RankShard

PIECE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class OffloadedPages:
    """Implements `HostPages`. `pieces[g]`: group g's pages in order, uint8 `[pages, page_bytes]` each."""

    pieces: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        """See `HostPages.num_bytes`."""
        return sum(piece.numel() for group in self.pieces for piece in group)

    def export(self) -> list[bytes]:
        """See `HostPages.export`; the bytes of this rank."""
        return [b"".join(piece.numpy().tobytes() for piece in group) for group in self.pieces]


def offloaded(saved: HostPages, pools: Sequence[GroupPool]) -> OffloadedPages:
    """Return saved pages in the form of `save`, also those that came as bytes. `pools`: those of this rank."""
    if isinstance(saved, ImportedPages):
        rows = []
        for pool, data in zip(pools, saved.data, strict=True):
            pages = np.frombuffer(bytearray(data), dtype=np.uint8).reshape(-1, max(1, pool.group.page_bytes))
            rows.append((torch.from_numpy(pages),) if len(pages) else ())
        return OffloadedPages(tuple(rows))
    assert isinstance(saved, OffloadedPages), "these pages were saved by another executor"
    return saved


@torch.inference_mode()
def save(pools: Sequence[GroupPool], pages: Sequence[Sequence[int]]) -> OffloadedPages:
    """Copy `pages`, a list for each pool, to the host. On CUDA in the current stream, which is awaited."""
    saved = OffloadedPages(tuple(tuple(_save_pieces(pool, own)) for pool, own in zip(pools, pages, strict=True)))
    device = pools[0].pages_as_bytes.device if pools else None
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return saved


@torch.inference_mode()
def load(pools: Sequence[GroupPool], saved: OffloadedPages, pages: Sequence[Sequence[int]]) -> None:
    """Copy saved KV into `pages`, a list for each pool.

    On CUDA in the current stream; torch keeps the pinned pieces alive until then.
    """
    for pool, pieces, own in zip(pools, saved.pieces, pages, strict=True):
        num_saved = sum(map(len, pieces))
        assert len(own) == num_saved, f"{num_saved} pages were saved, {len(own)} are given"
        rows, first = pool.pages_as_bytes, 0
        for piece in pieces:
            index = _index(own[first : first + len(piece)], rows.device)
            rows.index_copy_(0, index, piece.to(rows.device, non_blocking=True))
            first += len(piece)


@torch.inference_mode()
def zero(pools: Sequence[GroupPool], pages: Sequence[Sequence[int]]) -> None:
    """Set `pages`, a list for each pool, to zero. On CUDA in the current stream."""
    for pool, own in zip(pools, pages, strict=True):
        rows = pool.pages_as_bytes
        rows.index_fill_(0, _index(own, rows.device), 0)


def _save_pieces(pool: GroupPool, pages: Sequence[int]) -> Iterator[Tensor]:
    rows, count = pool.pages_as_bytes, pool.group.pages_in(PIECE_BYTES)
    for first in range(0, len(pages), count):
        gathered = rows.index_select(0, _index(pages[first : first + count], rows.device))
        if rows.device.type == "cpu":
            yield gathered
        else:
            yield torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True).copy_(gathered, non_blocking=True)


def _index(pages: Sequence[int], device: torch.device) -> Tensor:
    """Page numbers on the device."""
    return to_device(np.asarray(pages, dtype=np.int64), device)


HASH_BYTES = 4 << 20
"""Bytes of KV hashed at a time: hashing takes about ten times as much memory."""


class KVHasher(Protocol):
    """Hashes pages of all ranks of a replica. Called by the scheduler thread, once the steps that write the pages are
    resolved.
    """

    def digest(self, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int) -> tuple[RankDigest, ...]:
        """Return the digests of `pages`, a list for each group, by rank.

        In group g they are the pages from number `firsts[g]` on of a request of `num_tokens` tokens.
        """
        ...


class PoolHasher:
    """Implements `KVHasher` over one rank's pools. `layout` is the whole model's.

    DRAFT groups have no digest: a peer need not have them.
    """

    def __init__(self, pools: Sequence[GroupPool], layout: KVLayout, coord: RankCoord) -> None:
        self._pools = pools
        self._windows = [RankShard.of(group, coord) for group in layout.groups]
        self._rank = coord.rank

    def digest(self, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`; returns this rank's digest only."""
        groups: list[GroupDigest] = []
        for window, pool, own, first in zip(self._windows, self._pools, pages, firsts, strict=True):
            if window.group.kind is not GroupKind.DRAFT:
                groups += digest_group(window, _bytes_of(pool, own), first, num_tokens)
        return (RankDigest(self._rank, tuple(groups)),)


@torch.inference_mode()
def _bytes_of(pool: GroupPool, pages: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    rows, count = pool.pages_as_bytes, pool.group.pages_in(HASH_BYTES)
    for first in range(0, len(pages), count):
        yield rows.index_select(0, _index(pages[first : first + count], rows.device)).cpu().numpy()
