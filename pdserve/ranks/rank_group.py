"""What a rank and the others of its replica owe each other beside the log: `WorkerLinks` is the leader's, `Rank0Link` a
follower's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pdserve.errors import PdserveError
from pdserve.transfer.checksum import RankDigest

T = TypeVar("T")


class RankGroup(Protocol):
    """A leader waits where a follower only reports. Raises RankError when a rank is lost. Scheduler thread."""

    def computed(self, step: int) -> None:
        """This rank's part of `step` is computed. The leader's return says that all ranks' are."""
        ...

    def offloaded(self, number: int) -> None:
        """The pages of the so many-th offload are copied here. The leader's return says: at all ranks."""
        ...

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """What this rank has of the pages that are hashed as the so many-th; where we lead, what all have."""
        ...

    def root_cause(self) -> PdserveError | None:
        """An exchange with other ranks failed here: who is lost, if anybody, as soon as that is known."""
        ...


def guarded(compute: Callable[[], T], root_cause: Callable[[], PdserveError | None]) -> T:
    """Compute. Where that fails because another rank is lost, that is the error."""
    try:
        return compute()
    except Exception as error:
        lost = root_cause()
        if lost is not None:
            raise lost from error
        raise
