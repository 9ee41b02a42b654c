"""`LatentPages`: attention of layers with latents (MLA), with torch, over the pool of an MLA group.

Layers with an index (DSA) have a second pool, that of an INDEX group.

All tensor ranks hold the latents of all tokens. Each attends with its own query heads.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from pdserve.model.attention.interface import CapturableBackend, Heads
from pdserve.model.attention.latent_index import Index, IndexInputs, select_tokens
from pdserve.model.attention.latents import LatentPlane, LatentProjection, attend_latents
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.paged_attention import PagedPlane
from pdserve.model.attention.paged_rows import PassRows
from pdserve.model.forward_batch import ForwardBatch


@dataclasses.dataclass(frozen=True, eq=False)
class LatentOptions:
    """Implements `AttentionOptions`: the scores are multiplied by `scaling`, and every earlier token is seen."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    indices: Tensor | None = None


class LatentPages:
    """Implements `AttentionBackend` over one pool of latents."""

    def __init__(self, pool: GroupPool, index: GroupPool | None = None) -> None:
        self._pool = pool
        self._planes = _planes(pool)
        self._index: dict[int, PagedPlane] = {}
        """Index keys by layer of the pool."""
        if index is not None:
            numbers = map(pool.group.layers.index, index.group.layers)
            self._index = dict(zip(numbers, _planes(index), strict=True))

    @property
    def planes(self) -> tuple[list[PagedPlane], dict[int, PagedPlane]]:
        """The latents of each layer of the pool, and the index keys of those with an index."""
        return self._planes, self._index

    def capturing(self) -> CapturableBackend | None:
        """See `AttentionBackend.capturing`. Returns None: tensor shapes depend on the rows' lengths."""
        return None

    def begin(self, batch: ForwardBatch) -> LatentAttention:
        """See `AttentionBackend.begin`."""
        every = np.arange(len(batch.host.starts))
        rows = PassRows(batch, every, self._pool.group.page_tokens, is_decode=False)
        return LatentStep(self._planes, self._index, self._pool.null_page, batch, rows)


def _planes(pool: GroupPool) -> list[PagedPlane]:
    """Return the only plane of each layer of a pool."""
    return [PagedPlane(pool.plane(layer, 0), pool.plane_blocks(layer, 0)) for layer in range(pool.group.num_layers)]


class LatentAttention(ABC):
    """Implements `StepAttention` for layers with latents."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Must not be called: the pool has no keys and values."""
        raise AssertionError("the layer has latents")

    @abstractmethod
    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        latents: Tensor,
        projection: LatentProjection,
        scale: float,
        index: Index | None = None,
    ) -> Tensor:
        """Write the latents of the step's tokens into the pool, then attend over those of each token's row.

        `query` `[N, heads, key width]` and `latents` `[N, rank + rope width]` are rotated. `layer` counts the layers of
        the pool. Every token sees its own row's positions up to and including itself. With `index`, whose keys are
        written too, it attends to those of them that it selects, or has selected in an earlier layer. `scale`
        multiplies the scores. Returns `[N, heads, v_width]`.
        """


class LatentStep(LatentAttention):
    """Attention of one step over latents, with torch."""

    def __init__(
        self,
        planes: list[PagedPlane],
        index: dict[int, PagedPlane],
        null_page: int,
        batch: ForwardBatch,
        rows: PassRows,
    ) -> None:
        self._planes, self._index, self._null_page, self._rows = planes, index, null_page, rows
        self._pages, self._slots = batch.write_pages, batch.write_slots
        self._selected: Tensor | None = None
        """What the tokens select in the last layer with an index; None: all tokens that they may see."""

    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        latents: Tensor,
        projection: LatentProjection,
        scale: float,
        index: Index | None = None,
    ) -> Tensor:
        """See `LatentAttention.attend_latents`."""
        plane = self._planes[layer]
        plane.values[self._pages, 0, self._slots] = latents
        held = LatentPlane(plane, projection.rank, self._null_page, projection)
        if isinstance(index, IndexInputs):
            keys = self._index[layer]
            keys.values[self._pages, 0, self._slots] = index.key
            self._selected = select_tokens(index, self._rows, keys, self._null_page)
        selected = None if index is None or self._selected is None else self._selected[None]
        options = LatentOptions(scale, indices=selected)
        return attend_latents(query, latents, options, self._rows, held)
