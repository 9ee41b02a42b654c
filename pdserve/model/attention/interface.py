"""Interface between decoder layers and attention backends."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.kernels import rotate


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Output of a layer's q/k/v projection, and the inputs of the norm and rotation that precede attention.

    `qkv` is `[N, num_heads + 2 * num_kv_heads, head_dim]`, contiguous. `q_norm` and `k_norm` are per-head norms, both
    or neither None. `cos` and `sin` come from `Rotary.tables`. A backend may fuse norm, rotation and the KV write.
    """

    qkv: Tensor
    num_heads: int
    num_kv_heads: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    cos: Tensor
    sin: Tensor

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Apply norms and rotation in torch.

        Returns queries `[N, num_heads, head_dim]`, keys and values `[N, num_kv_heads, head_dim]`.
        """
        num_rotated = self.num_heads + self.num_kv_heads
        q_and_k, v = self.qkv[:, :num_rotated], self.qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            normed = self.q_norm(q_and_k[:, : self.num_heads]), self.k_norm(q_and_k[:, self.num_heads :])
            q_and_k = torch.cat(normed, 1)
        q_and_k = rotate(q_and_k, self.cos, self.sin)
        return q_and_k[:, : self.num_heads], q_and_k[:, self.num_heads :], v


class StepAttention(Protocol):
    """Attention of one step. A layer calls it; the layers run in order."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Write the keys and values of `heads` into the pool, then attend with its queries.

        Every token sees its own row's positions up to and including itself. Returns `[N, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """An attention implementation bound to one KV pool."""

    def begin(self, batch: ForwardBatch) -> StepAttention:
        """Compute once what all layers of a step share."""
        ...

    def capturing(self) -> CapturableBackend | None:
        """Return the backend itself when a CUDA graph can capture its decode steps, else None."""
        ...


class CapturedAttention(StepAttention, Protocol):
    """Attention of decode steps of one size, for capture in a CUDA graph. It reads tensors at fixed addresses.

    A token with a negative page is not written.
    """

    def filling(self, rows: HostRows) -> list[Filling]:
        """Return the fillings for `fill` that set up the next replay. `rows` has as many rows as the captured size.

        The fillings are enqueued after earlier replays.
        """
        ...


class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured."""

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> CapturedAttention:
        """Return attention of `num_rows` rows with one new token and up to `max_pages` pages each.

        Called once for each size. `write_pages` and `write_slots` are as in `ForwardBatch`, at fixed addresses.
        """
        ...
