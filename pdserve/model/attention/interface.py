"""The seam between a model family and the way attention over pages is computed."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.rotary import rotate


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """What the q/k/v product of a layer gave, and what is still to be done before attention.

    `qkv` `[N, num_heads + 2 * num_kv_heads, head_dim]`, contiguous; norms of every query and every key head, both or
    none; `cos`, `sin` as `Rotary.tables` gives them. A backend may do all of it in one pass, with the write into pages.
    """

    qkv: Tensor
    num_heads: int
    num_kv_heads: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    cos: Tensor
    sin: Tensor

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[N, num_heads, head_dim]`, keys and values `[N, num_kv_heads, head_dim]`, by torch."""
        num_rotated = self.num_heads + self.num_kv_heads
        q_and_k, v = self.qkv[:, :num_rotated], self.qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            normed = self.q_norm(q_and_k[:, : self.num_heads]), self.k_norm(q_and_k[:, self.num_heads :])
            q_and_k = torch.cat(normed, 1)
        q_and_k = rotate(q_and_k, self.cos, self.sin)
        return q_and_k[:, : self.num_heads], q_and_k[:, self.num_heads :], v


class StepAttention(Protocol):
    """Attention of one step. A family calls it once per layer, in order."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Write the keys and values of `heads` into the pool, then attend with its queries.

        Every token sees its own row's positions up to and with itself. Returns `[N, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """One implementation, bound to one KV pool."""

    def begin(self, batch: ForwardBatch) -> StepAttention:
        """Compute once what all layers of a step share."""
        ...

    def capturing(self) -> CapturableBackend | None:
        """Itself, where its decode steps can be captured in a CUDA graph."""
        ...


class CapturedAttention(StepAttention, Protocol):
    """Attention of decode steps of one size, to be captured in a CUDA graph: it reads tensors that stay in place.

    A token whose page is negative is not written.
    """

    def filling(self, rows: HostRows) -> list[Filling]:
        """What the next replay computes, as many rows as the size: for `fill`, behind the replays before."""
        ...


class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured."""

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> CapturedAttention:
        """Attention of `num_rows` rows, one new token each, of up to `max_pages` pages. Called once for each size.

        `write_pages`, `write_slots` as in `ForwardBatch`, tensors that stay in place, too.
        """
        ...
