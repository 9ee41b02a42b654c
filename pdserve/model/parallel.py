"""`Parallel`: the rank's coordinates in its replica, and the collectives that models use.

Each rank makes one at start-up: `open_parallel` in `torch_parallel`, or `SingleRank` for an unsplit model. Called by
decoders and the executor, by all ranks of a group in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.base.parallel import SINGLE, RankCoord, dealt
from pdserve.model.dp_attention import DPAttentionGroup, TokenShare, own_slice, padded, stripped


class Arrival(Protocol):
    """Tensors in transit to this rank."""

    def wait(self) -> None:
        """Block until the tensors have arrived; on CUDA, make the current stream wait instead.

        May be called on any thread, any number of times.

        Raises:
            RankError: another rank is gone or timed out.
        """
        ...


class Parallel(Protocol):
    """One rank of a replica. Methods raise RankError when another rank is gone or times out."""

    @property
    def coord(self) -> RankCoord:
        """Coordinates of this rank in its replica."""
        ...

    @property
    def dp_attention_group(self) -> DPAttentionGroup:
        """The ranks that the feed-forward layers are split over."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the tensor ranks of this stage, in place."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate `[n, ...]` of each tensor rank: `[tp_size * n, ...]` on all of them."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows: tensor rank 0 receives the first `send[0]` rows of `x`, rank 1 the next, and so on.

        Returns the `receive[0]` rows of tensor rank 0, then those of rank 1, and so on: `[sum(receive), ...]`.
        """
        ...

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """Concatenate `[S, share]` of each tensor rank to `[S, vocab_size]` on tensor rank 0; None on other ranks."""
        ...

    def send(self, x: Tensor) -> None:
        """Start sending `x` to the same tensor rank of the next stage. `x` must not change any more."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive a tensor from the same tensor rank of the previous stage."""
        ...

    def share_tokens(self, tensors: Sequence[Tensor]) -> Arrival:
        """Start overwriting `tensors` on every rank of the replica with those of the sampling rank."""
        ...

    def begin_least(self, values: Tensor, then: Callable[[], None]) -> Arrival:
        """Start overwriting `values`, on the host, with the element-wise minimum over all ranks of the replica.

        `then` is called on any thread when the operation completes or fails. At most one may be in flight. Other ranks
        may still be waiting when this rank goes on.
        """
        ...

    def close(self) -> None:
        """Leave the replica."""
        ...


class StageRanks:
    """Implements `DPAttentionGroup` for the tensor ranks of one stage of one replica: N equals T."""

    spans_replicas = False

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self.size, self.rank = parallel.coord.shape.tp_size, parallel.coord.tp_rank

    def begin(self, step: int, num_tokens: int) -> None:
        """See `DPAttentionGroup.begin`. Does nothing."""

    def change_weights(self) -> None:
        """See `DPAttentionGroup.change_weights`. Does nothing: the input log orders the ranks."""

    def token_share(self, num_tokens: int) -> TokenShare:
        """See `DPAttentionGroup.token_share`."""
        sizes = dealt(num_tokens, self.size)
        return TokenShare(sizes, own_slice(sizes, self.rank))

    def gather(self, x: Tensor) -> Tensor:
        """See `DPAttentionGroup.gather`. Returns `x` itself."""
        return x

    def reduce_sum(self, x: Tensor) -> Tensor:
        """See `DPAttentionGroup.reduce_sum`."""
        return self._parallel.all_reduce(x)

    def all_gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `DPAttentionGroup.all_gather_rows`."""
        return stripped(self._parallel.all_gather(padded(part, max(sizes))), sizes)

    def rejoin(self, part: Tensor, num_tokens: int) -> Tensor:
        """See `DPAttentionGroup.rejoin`."""
        return self.all_gather_rows(part, dealt(num_tokens, self.size))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `DPAttentionGroup.all_to_all`."""
        return self._parallel.all_to_all(x, send, receive)


class _There:
    """Implements `Arrival` for tensors that are already present."""

    def wait(self) -> None:
        """See `Arrival.wait`."""


_THERE = _There()


def is_sampler(coord: RankCoord) -> bool:
    """Whether `coord` is the rank that has all logits: tensor rank 0 of the last stage."""
    return coord.is_last_stage and coord.tp_rank == 0


class SingleRank:
    """Implements `Parallel` for a replica of one rank."""

    coord: RankCoord = SINGLE

    @property
    def dp_attention_group(self) -> DPAttentionGroup:
        """See `Parallel.dp_attention_group`."""
        return StageRanks(self)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Parallel.all_reduce`."""
        return x

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Parallel.all_gather`."""
        return part

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Parallel.all_to_all`."""
        assert list(send) == list(receive) == [len(x)], (send, receive, x.shape)
        return x

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """See `Parallel.gather_logits`."""
        assert part.shape[1] == vocab_size, (part.shape, vocab_size)
        return part

    def send(self, x: Tensor) -> None:
        """See `Parallel.send`. There is no next stage."""
        raise AssertionError("a single-rank replica has no next stage")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Parallel.receive`. There is no previous stage."""
        raise AssertionError("a single-rank replica has no previous stage")

    def share_tokens(self, tensors: Sequence[Tensor]) -> Arrival:
        """See `Parallel.share_tokens`."""
        return _THERE

    def begin_least(self, values: Tensor, then: Callable[[], None]) -> Arrival:
        """See `Parallel.begin_least`."""
        then()
        return _THERE

    def close(self) -> None:
        """See `Parallel.close`."""
