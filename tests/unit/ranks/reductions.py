"""Stand-ins for other ranks: MIN over ranks that live in one process, for `Parallel.begin_least`; and no other rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.errors import PdserveError
from pdserve.transfer.checksum import RankDigest


class Reductions:
    """MIN over what all ranks have brought to a round, which ends with the last of them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rounds: list[list[tuple[Tensor, Callable[[], None]]]] = []
        self._counts = [0] * num_ranks

    def begin(self, rank: int, values: Tensor, then: Callable[[], None]) -> Ended:
        number = self._counts[rank]
        self._counts[rank] += 1
        if number == len(self.rounds):
            self.rounds.append([])
        members = self.rounds[number]
        members.append((values, then))
        if len(members) == self.num_ranks:
            brought = torch.stack([each for each, _ in members])
            owned = (brought[:, :, 0] != torch.iinfo(torch.int64).max).sum(0)
            assert len(owned) and bool((owned >= 1).all()), "each thing is a rank's, and there is something"
            least = brought.amin(0)
            for each, end in members:
                each.copy_(least)
                end()
        return Ended(members, self.num_ranks)


class Ended:
    """`Arrival` of a round that must be over."""

    def __init__(self, members: list[tuple[Tensor, Callable[[], None]]], count: int) -> None:
        self._members, self._count = members, count

    def wait(self) -> None:
        assert len(self._members) == self._count, "a rank would wait for another"


class Unaided:
    """`RankGroup` of a rank that nobody waits for."""

    def computed(self, step: int) -> None: ...

    def offloaded(self, number: int) -> None: ...

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        return (own,)

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        return (own,)

    def root_cause(self) -> PdserveError | None:
        return None
