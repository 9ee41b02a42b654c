"""Per-step synchronisation of a replica's ranks beside the input log: `WorkerLinks` on rank 0, `Rank0Link` on
followers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pdserve.errors import PdserveError
from pdserve.transfer.checksum import RankDigest

T = TypeVar("T")


class RankGroup(Protocol):
    """Reports of progress: rank 0 waits, a follower only reports. Raises RankError when a rank is lost. Scheduler
    thread.
    """

    def computed(self, step: int) -> None:
        """Report that this rank's part of `step` is computed. On rank 0, return when all ranks' parts are."""
        ...

    def offloaded(self, number: int) -> None:
        """Report that the pages of offload `number` are copied here. On rank 0, return when they are on all ranks."""
        ...

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """Report this rank's digest for hash request `number`; return it. On rank 0, wait for and return all ranks'
        digests.
        """
        ...

    def root_cause(self) -> PdserveError | None:
        """Return the loss of a rank after a failed exchange, as soon as it is known; None: no rank is lost."""
        ...


def guarded(compute: Callable[[], T], root_cause: Callable[[], PdserveError | None]) -> T:
    """Call `compute`. When it fails because another rank is lost, raise that loss instead."""
    try:
        return compute()
    except Exception as error:
        lost = root_cause()
        if lost is not None:
            raise lost from error
        raise
