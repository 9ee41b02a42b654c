"""Hashes of this rank's KV pages, read from its pools. The composition roots make it where KV checksums are enabled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.base.parallel import RankCoord
from pdserve.memory.layout import KVLayout
from pdserve.model.attention.page_gather import KVPool
from pdserve.transfer.checksum import RankDigest, digest_group
from pdserve.transfer.plan import RankShard

PIECE_BYTES = 4 << 20
"""Bytes of KV hashed at a time: hashing takes about ten times as much memory."""


class KVHasher(Protocol):
    """Hashes pages of all ranks of a replica. Called by the scheduler thread, once the steps that write the pages are
    resolved.
    """

    def digest(self, pages: Sequence[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        """Return the digests of `pages` by rank. They are the pages from index `first` on of a request of `num_tokens`
        tokens.
        """
        ...


class PoolHasher:
    """Implements `KVHasher` over one rank's pools. `layout` is the whole model's."""

    def __init__(self, pools: Sequence[KVPool], layout: KVLayout, place: RankCoord) -> None:
        self._pools = pools
        self._windows = [RankShard.of(group, place) for group in layout.groups]
        self._rank = place.rank

    def digest(self, pages: Sequence[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`; returns this rank's digest only."""
        groups = tuple(
            digest_group(window, _read(pool, pages), first, num_tokens)
            for window, pool in zip(self._windows, self._pools, strict=True)
        )
        return (RankDigest(self._rank, groups),)


@torch.inference_mode()
def _read(pool: KVPool, pages: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
    rows = pool.pages.view(pool.num_pages, -1).view(torch.uint8)
    count = max(1, PIECE_BYTES // pool.group.page_bytes)
    for begin in range(0, len(pages), count):
        index = torch.as_tensor(pages[begin : begin + count], dtype=torch.int64, device=rows.device)
        yield rows.index_select(0, index).cpu().numpy()
