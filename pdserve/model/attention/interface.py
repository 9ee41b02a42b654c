"""The seam between a model family and the way attention over pages is computed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.model.forward_batch import ForwardBatch


class StepAttention(Protocol):
    """Attention of one step. A family calls it once per layer, in order."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write `k`, `v` `[N, num_kv_heads, head_dim]` into the pool, then attend with `q` `[N, num_heads, head_dim]`.

        Every token sees its own row's positions up to and with itself. Returns `[N, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """One implementation, bound to one KV pool."""

    def begin(self, batch: ForwardBatch) -> StepAttention:
        """Compute once what all layers of a step share."""
        ...
