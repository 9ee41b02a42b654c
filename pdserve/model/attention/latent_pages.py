"""`LatentPages`: attention of layers with latents (MLA), with torch, over the pool of an MLA group.

All tensor ranks hold the latents of all tokens. Each attends with its own query heads.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pdserve.model.attention.interface import Heads
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

    def __init__(self, pool: GroupPool, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._planes = [
            PagedPlane(pool.plane(layer, 0), pool.plane_blocks(layer, 0)) for layer in range(pool.group.num_layers)
        ]

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None: tensor shapes depend on the rows' lengths."""

    def begin(self, batch: ForwardBatch) -> LatentStep:
        """See `AttentionBackend.begin`."""
        every = np.arange(len(batch.host.starts))
        rows = PassRows(batch, every, self._pool.group.page_tokens, is_decode=False)
        return LatentStep(self._planes, self._pool.null_page, batch, rows)


class LatentStep:
    """Attention of one step over latents."""

    def __init__(self, planes: list[PagedPlane], null_page: int, batch: ForwardBatch, rows: PassRows) -> None:
        self._planes, self._null_page, self._rows = planes, null_page, rows
        self._pages, self._slots = batch.write_pages, batch.write_slots

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Must not be called: the pool has no keys and values."""
        raise AssertionError("the layer has latents")

    def attend_latents(
        self, layer: int, query: Tensor, latents: Tensor, projection: LatentProjection, scale: float
    ) -> Tensor:
        """Write the latents of the step's tokens into the pool, then attend over those of each token's row.

        `query` `[N, heads, key width]` and `latents` `[N, rank + rope width]` are rotated. `layer` counts the layers of
        the pool. Every token sees its own row's positions up to and including itself. `scale` multiplies the scores.
        Returns `[N, heads, v_width]`.
        """
        plane = self._planes[layer]
        plane.values[self._pages, 0, self._slots] = latents
        held = LatentPlane(plane, projection.rank, self._null_page, projection)
        return attend_latents(query, latents, LatentOptions(scale), self._rows, held)
