"""The ranks that feed-forward layers are split over: a stage's tensor ranks; with DP attention those of all replicas.

`Parallel` has one, and feed-forward layers call it. Each of these ranks *has in hand* some tokens of the batch: its
share of its replica's, which are dealt out in order among the replica's tensor ranks.

    `StageRanks` in `parallel`            all ranks have all tokens of the batch: nothing to gather, sums stay
    `AllReplicas` in `wide_replicas`      each replica has a batch of its own; a layer computes all of them together
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TokenShare:
    """What each rank has in hand: `sizes[i]` tokens at rank i; ours are those at `mine` among our replica's."""

    sizes: Sequence[int]
    mine: slice


class DPAttentionGroup(Protocol):
    """One rank among them. Raises RankError where another rank is gone or too late.

    N are the tokens of this rank's replica, T those of all replicas: one replica's behind the other's.
    """

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    @property
    def rank(self) -> int:
        """Number of this one."""
        ...

    @property
    def spans_replicas(self) -> bool:
        """Whether a rank whose replica has nothing to compute must take part nevertheless."""
        ...

    def begin(self, step: int, num_tokens: int) -> None:
        """All ranks begin `step`, in which this one's replica computes `num_tokens` tokens."""
        ...

    def hand(self, num_tokens: int) -> TokenShare:
        """What the ranks have in hand of the batch, of which `num_tokens` are this replica's."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """`[N, ...]`, equal on all ranks of a replica: `[T, ...]`, equal on all ranks. Not always a copy."""
        ...

    def reduce_sum(self, x: Tensor) -> Tensor:
        """`[N, ...]` of the sum of `x` `[T, ...]` over all ranks. `x` may be overwritten."""
        ...

    def all_gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """`part` of each rank, which has `sizes[i]` rows at rank i, one behind the other: on all ranks."""
        ...

    def rejoin(self, part: Tensor, num_tokens: int) -> Tensor:
        """What this replica's ranks have in hand, one behind the other: `[num_tokens, ...]` on all of them."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Deal rows out: the first `send[0]` of `x` go to rank 0, and so on.

        Returns the `receive[0]` rows of rank 0, then those of rank 1, and so on: `[sum(receive), ...]`.
        """
        ...


def own_slice(sizes: Sequence[int], rank: int) -> slice:
    """Where the `sizes[rank]` things of `rank` lie among all, one rank's behind the other's."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def padded(part: Tensor, num_rows: int) -> Tensor:
    """`part` with zeros behind it, if need be: `[num_rows, ...]`."""
    if len(part) == num_rows:
        return part
    whole = part.new_zeros(num_rows, *part.shape[1:])
    whole[: len(part)] = part
    return whole


def stripped(whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first `sizes[i]` rows of each of the equal parts of `whole`, one behind the other."""
    share = len(whole) // len(sizes)
    if all(size == share for size in sizes):
        return whole
    return torch.cat([part[:size] for part, size in zip(torch.split(whole, share), sizes, strict=True)])
