"""What a model needs of its replica: its place, and the few ways in which ranks exchange tensors.

Made once by each rank at start-up (`open_parallel` in `torch_parallel`, or `SingleRank` where nothing is split); called
by families and by the executor, by all ranks of a group in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.base.parallel import SINGLE, RankCoord, dealt
from pdserve.model.dp_attention import DPAttentionGroup, TokenShare, own_slice, padded, stripped


class Arrival(Protocol):
    """Tensors that are under way to this rank."""

    def wait(self) -> None:
        """Until they are there, on the CPU; on CUDA the current stream waits. Any thread, any number of times.

        Raises:
            RankError: another rank is gone or too late.
        """
        ...


class Parallel(Protocol):
    """One rank among those of its replica. Raises RankError where another rank is gone or too late."""

    @property
    def place(self) -> RankCoord:
        """Where this rank stands."""
        ...

    @property
    def wide(self) -> DPAttentionGroup:
        """The ranks that the feed-forward layers are split over."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the tensor ranks of this stage; `x` itself is overwritten with it."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """`[n, ...]` of each tensor rank, one behind the other: `[tp_size * n, ...]` on all of them."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Deal rows out: the first `send[0]` of `x` go to tensor rank 0, and so on.

        Returns the `receive[0]` rows of tensor rank 0, then those of rank 1, and so on: `[sum(receive), ...]`.
        """
        ...

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """`[S, share]` of each tensor rank, side by side: `[S, vocab_size]` on tensor rank 0, None on the others."""
        ...

    def send(self, x: Tensor) -> None:
        """Begin to send `x`, which must not change any more, to the same tensor rank of the next stage."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same tensor rank of the stage before has sent."""
        ...

    def share_tokens(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to overwrite `tensors` on every rank of the replica with those of the sampling rank."""
        ...

    def begin_least(self, values: Tensor, then: Callable[[], None]) -> Arrival:
        """Begin to overwrite `values`, on the host, with the least that any rank of the replica has there.

        `then` is called when that is done, or has failed, on any thread. One at a time; it may be late on other ranks
        while this one goes on.
        """
        ...

    def close(self) -> None:
        """Leave the replica."""
        ...


class StageRanks:
    """Implements `DPAttentionGroup` for the tensor ranks of one stage of one replica: N is T."""

    spans_replicas = False

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self.size, self.rank = parallel.place.shape.tp_size, parallel.place.tp_rank

    def begin(self, step: int, num_tokens: int) -> None:
        """See `DPAttentionGroup.begin`; nothing to do."""

    def hand(self, num_tokens: int) -> TokenShare:
        """See `DPAttentionGroup.hand`."""
        sizes = dealt(num_tokens, self.size)
        return TokenShare(sizes, own_slice(sizes, self.rank))

    def gather(self, x: Tensor) -> Tensor:
        """See `DPAttentionGroup.gather`: `x` itself."""
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
    """Implements `Arrival` where nothing is awaited."""

    def wait(self) -> None:
        """See `Arrival.wait`."""


_THERE = _There()


def is_sampler(place: RankCoord) -> bool:
    """Whether this is the one rank that has all logits: tensor rank 0 of the last stage."""
    return place.is_last_stage and place.tp_rank == 0


class SingleRank:
    """Implements `Parallel` for a replica of one rank."""

    place: RankCoord = SINGLE

    @property
    def wide(self) -> DPAttentionGroup:
        """See `Parallel.wide`."""
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
        """See `Parallel.send`; there is no next stage."""
        raise AssertionError("one rank has nobody to send to")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Parallel.receive`; there is no stage before."""
        raise AssertionError("one rank has nobody to receive from")

    def share_tokens(self, tensors: Sequence[Tensor]) -> Arrival:
        """See `Parallel.share_tokens`."""
        return _THERE

    def begin_least(self, values: Tensor, then: Callable[[], None]) -> Arrival:
        """See `Parallel.begin_least`."""
        then()
        return _THERE

    def close(self) -> None:
        """See `Parallel.close`."""
