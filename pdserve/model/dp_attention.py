"""Interface to the ranks that feed-forward layers are split over.

Without DP attention these are the tensor ranks of a stage; with DP attention, the ranks of all replicas. `Parallel`
holds one group, and feed-forward layers call it. A replica's tokens are divided in order among its tensor ranks. The
part of one rank is its token share.

    `StageRanks` in `parallel`                 all ranks have all tokens of the batch: no gather, sums stay in place
    `AllReplicas` in `dp_attention_experts`    each replica has its own batch; a layer computes all batches together
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TokenShare:
    """Token share of each rank: `sizes[i]` tokens at rank i. `mine` is this rank's slice of its replica's batch."""

    sizes: Sequence[int]
    mine: slice


class DPAttentionGroup(Protocol):
    """One rank's view of the group. Methods raise RankError when another rank is gone or times out.

    N is the number of tokens of this rank's replica. T is the number of tokens of all replicas, concatenated in
    replica order.
    """

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        ...

    @property
    def spans_replicas(self) -> bool:
        """Whether a rank must take part in a step even when its replica has no tokens."""
        ...

    def begin(self, step: int, num_tokens: int) -> None:
        """Begin `step` on all ranks. This rank's replica computes `num_tokens` tokens."""
        ...

    def change_weights(self) -> None:
        """Compute with other weights from the next step on. `begin` fails unless all ranks have done so."""
        ...

    def token_share(self, num_tokens: int) -> TokenShare:
        """Return the token shares of all ranks. The replica's batch has `num_tokens` tokens."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Gather `[N, ...]`, equal on a replica's ranks, to `[T, ...]`, equal on all ranks. May return `x` itself."""
        ...

    def reduce_sum(self, x: Tensor) -> Tensor:
        """Sum `x` `[T, ...]` over all ranks and return this replica's `[N, ...]`. May overwrite `x`."""
        ...

    def all_gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the `part` of every rank on all ranks. Rank i's part has `sizes[i]` rows."""
        ...

    def rejoin(self, part: Tensor, num_tokens: int) -> Tensor:
        """Concatenate the token shares of this replica: `[num_tokens, ...]` on all its ranks."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows: rank 0 receives the first `send[0]` rows of `x`, rank 1 the next `send[1]`, and so on.

        Returns the `receive[0]` rows of rank 0, then those of rank 1, and so on: `[sum(receive), ...]`.
        """
        ...


def own_slice(sizes: Sequence[int], rank: int) -> slice:
    """Return the slice of `rank` in the concatenation of all ranks' parts; rank i's part has `sizes[i]` items."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def padded(part: Tensor, num_rows: int) -> Tensor:
    """Pad `part` with zero rows to `[num_rows, ...]`."""
    if len(part) == num_rows:
        return part
    whole = part.new_zeros(num_rows, *part.shape[1:])
    whole[: len(part)] = part
    return whole


def stripped(whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split `whole` into equal parts and concatenate the first `sizes[i]` rows of part i."""
    share = len(whole) // len(sizes)
    if all(size == share for size in sizes):
        return whole
    return torch.cat([part[:size] for part, size in zip(torch.split(whole, share), sizes, strict=True)])
