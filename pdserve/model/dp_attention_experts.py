"""DP attention: feed-forward layers split over the ranks of all replicas. Each replica has its own batch.

Made by `TorchParallel`, whose default process group has these ranks. All ranks compute every step together: a *round*.
A replica without work takes part with zero tokens.

    begin         number of tokens of each replica    all_gather of three integers, on the host
    gather        each replica's tokens to all ranks  each rank contributes its token share
    reduce_sum    partial sums to the token's replica
                  each rank receives the partial sums of its token share, adds them in rank order,
                  and shares the sums with the other ranks of its replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.base.parallel import DpRankCoord, dealt
from pdserve.errors import RankError
from pdserve.model.dp_attention import TokenShare, own_slice, padded, stripped

WithOthers = Callable[[str], AbstractContextManager[object]]
"""Turns torch errors into RankError; the argument names the operation."""


class AllReplicas:
    """Implements `DPAttentionGroup`. `gather_own` is `Parallel.all_gather` over the replica's own tensor ranks.

    `numbers` is a host (gloo) group of all these ranks; None when the default group is on the host.
    """

    spans_replicas = True

    def __init__(
        self,
        coord: DpRankCoord,
        gather_own: Callable[[Tensor], Tensor],
        with_others: WithOthers,
        numbers: dist.ProcessGroup | None,
    ) -> None:
        assert coord.in_replica.shape.pp_size == 1, "DP attention supports one pipeline stage"
        self.size, self.rank = coord.num_ranks, coord.rank
        self._coord = coord
        self._gather_own = gather_own
        self._with_others = with_others
        self._numbers = numbers
        self._token_share = TokenShare([0] * self.size, slice(0, 0))
        self._num_changes = 0
        """Changes of the weights since the start."""

    def begin(self, step: int, num_tokens: int) -> None:
        """See `DPAttentionGroup.begin`. Blocks until all ranks have begun `step`."""
        every = torch.empty(self.size, 3, dtype=torch.int64)
        with self._with_others("begin of a round"):
            own = torch.tensor([step, num_tokens, self._num_changes])
            dist.all_gather(list(every.unbind()), own, group=self._numbers)
        tp_size = self._coord.in_replica.shape.tp_size
        facts: list[list[int]] = every.tolist()
        firsts = facts[::tp_size]
        if any(changes != self._num_changes for _, _, changes in facts):
            raise RankError(f"the ranks compute with different weights: rank {self.rank} sees {facts}")
        others_step = any(there != step for there, _, _ in facts)
        if others_step or any(facts[i] != firsts[i // tp_size] for i in range(self.size)):
            raise RankError(f"the ranks are not in the same round: rank {self.rank} is in {step}, all are in {facts}")
        sizes = [size for _, count, _ in firsts for size in dealt(count, tp_size)]
        self._token_share = TokenShare(sizes, own_slice(dealt(num_tokens, tp_size), self._coord.in_replica.tp_rank))

    def change_weights(self) -> None:
        """See `DPAttentionGroup.change_weights`."""
        self._num_changes += 1

    def token_share(self, num_tokens: int) -> TokenShare:
        """See `DPAttentionGroup.token_share`. Returns the shares that `begin` computed."""
        return self._token_share

    def gather(self, x: Tensor) -> Tensor:
        """See `DPAttentionGroup.gather`."""
        return self.all_gather_rows(x[self._token_share.mine], self._token_share.sizes)

    def reduce_sum(self, x: Tensor) -> Tensor:
        """See `DPAttentionGroup.reduce_sum`. Adds in float32 and in rank order: the same bits in any batch."""
        if not len(x):
            return x
        sizes, num_mine = self._token_share.sizes, self._token_share.sizes[self.rank]
        parts = self.all_to_all(x, sizes, [num_mine] * self.size).view(self.size, num_mine, *x.shape[1:])
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        tp_size = self._coord.in_replica.shape.tp_size
        first = self._coord.first_rank
        return self.rejoin(total.to(x.dtype), sum(sizes[first : first + tp_size]))

    def all_gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `DPAttentionGroup.all_gather_rows`. Uses broadcasts without padding when few ranks have most rows."""
        share, total = max(sizes), sum(sizes)
        if 2 * total <= share * self.size:
            return self._in_turns(part, sizes)
        whole = part.new_empty(self.size * share, *part.shape[1:])
        with self._with_others("all_gather over all replicas"):
            dist.all_gather(list(whole.chunk(self.size)), padded(part, share).contiguous())
        return stripped(whole, sizes)

    def rejoin(self, part: Tensor, num_tokens: int) -> Tensor:
        """See `DPAttentionGroup.rejoin`."""
        sizes = dealt(num_tokens, self._coord.in_replica.shape.tp_size)
        return part if len(sizes) == 1 else stripped(self._gather_own(padded(part, sizes[0])), sizes)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `DPAttentionGroup.all_to_all`."""
        received = x.new_empty(sum(receive), *x.shape[1:])
        with self._with_others("all_to_all over all replicas"):
            dist.all_to_all_single(received, x.contiguous(), list(receive), list(send))
        return received

    def _in_turns(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Run `all_gather_rows` as one broadcast from each rank that has rows."""
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        whole[own_slice(sizes, self.rank)] = part
        with self._with_others("all_gather over all replicas"):
            works = [
                dist.broadcast(rows, source, async_op=True)
                for source, rows in enumerate(torch.split(whole, list(sizes)))
                if len(rows)
            ]
            for work in works:
                work.wait()
        return whole
